"""KV sizing: by count, by memory, by default; and one line where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from cluster.config import EngineConfig
from cluster.sizing import CPU_DEFAULT_BYTES, describe_pool, kv_blocks, swap_blocks
from workers.config import WorkerDescription

MIB = 2**20
RANK = WorkerDescription(
    **dict.fromkeys(("device", "dtype", "kv_dtype", "attention", "collectives"), "cpu"),
    rank=0,
    block_size=16,
    max_model_len=8192,
    vocab_size=100,
    layers=30,
    query_heads=9,
    kv_heads=3,
    weight_bytes=0,
    kv_bytes_per_block=MIB,
    kv_reading_bytes_per_block=0,
    free_bytes=1000 * MIB,
    host_free_bytes=1000 * MIB,
    iteration_bytes=0,
    threads=1,
    pid=1,
)


def test_by_count_and_by_memory() -> None:
    assert kv_blocks(EngineConfig(num_blocks=7), [RANK]) == 7
    assert kv_blocks(EngineConfig(kv_memory="64MiB"), [RANK]) == 64
    assert kv_blocks(EngineConfig(kv_memory="64MiB"), [RANK, replace(RANK, kv_bytes_per_block=3 * MIB)]) == 16


def test_by_default_a_modest_share_of_host_memory_or_most_of_the_device() -> None:
    assert kv_blocks(EngineConfig(), [RANK]) == 400
    assert kv_blocks(EngineConfig(), [replace(RANK, free_bytes=2**40)]) == CPU_DEFAULT_BYTES // MIB
    gpus = [replace(RANK, device="cuda:0"), replace(RANK, device="cuda:1", free_bytes=500 * MIB)]
    assert kv_blocks(EngineConfig(gpu_memory_utilization=0.8), gpus) == 400


def test_an_iteration_has_its_memory_beside_the_pool() -> None:
    busy = replace(RANK, iteration_bytes=250 * MIB)
    assert kv_blocks(EngineConfig(), [busy]) == 300, "0.4 of the 750 MiB that are left"
    assert kv_blocks(EngineConfig(num_blocks=750), [busy]) == 750
    with pytest.raises(ValueError, match=r"but 750\.0 MiB is free beside the weights and an iteration"):
        kv_blocks(EngineConfig(num_blocks=751), [busy])
    assert kv_blocks(EngineConfig(), [busy, busy]) == 0.4 * 500 / 2, "on CPUs all ranks take it from one memory"
    gpu = replace(busy, device="cuda:0")
    assert kv_blocks(EngineConfig(gpu_memory_utilization=0.9), [gpu]) == 650
    assert kv_blocks(EngineConfig(), [replace(gpu, kv_reading_bytes_per_block=MIB)]) == 325, "pages that are widened"


def test_host_memory_for_what_gives_way() -> None:
    swap = EngineConfig(preempt="swap")
    assert swap_blocks(EngineConfig(), [RANK], 100) == 0
    assert swap_blocks(swap, [RANK], 100) == 100, "as many as the pool has"
    assert swap_blocks(swap, [RANK], 400) == 150, "but no more than a quarter of what it leaves"
    assert swap_blocks(swap, [replace(RANK, device="cuda:0")], 400) == 250
    assert swap_blocks(EngineConfig(preempt="swap", swap_memory="7MiB"), [RANK], 400) == 7
    for size, words in (("2GiB", "is not there: 600.0 MiB of host memory is free"), ("1KiB", "raise --swap-memory")):
        with pytest.raises(ValueError, match=words):
            swap_blocks(EngineConfig(preempt="swap", swap_memory=size), [RANK], 400)
    with pytest.raises(ValidationError, match="--swap-memory needs --preempt swap"):
        EngineConfig(swap_memory="1GiB")


def test_memory_that_is_not_there_is_said_in_one_line() -> None:
    for config in (EngineConfig(num_blocks=2000), EngineConfig(kv_memory="2000MiB")):
        with pytest.raises(
            ValueError,
            match=r"need 1\.95 GiB of memory, but 1000\.0 MiB is free .*; lower",
        ):
            kv_blocks(config, [RANK])
    with pytest.raises(ValueError, match="raise --kv-memory"):
        kv_blocks(EngineConfig(kv_memory="1KiB"), [RANK])
    with pytest.raises(ValueError, match="raise --kv-memory or lower --block-size"):
        kv_blocks(EngineConfig(kv_memory="1KiB", block_size=16), [RANK])
    with pytest.raises(ValidationError, match="is no size; write it like 2GiB"):
        EngineConfig(kv_memory="lots")


def test_the_pool_is_described_in_tokens_and_requests() -> None:
    assert describe_pool(1024, 16, 8192) == (
        "16,384 tokens in 1,024 blocks of 16: 16 requests of 1,024 tokens, 2.0 of 8,192"
    )
