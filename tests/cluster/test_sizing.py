"""KV sizing: by count, by memory, by default; and one line where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from cluster.config import EngineConfig
from cluster.sizing import CPU_DEFAULT_BYTES, describe_pool, kv_blocks
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


def test_memory_that_is_not_there_is_said_in_one_line() -> None:
    for config in (EngineConfig(num_blocks=2000), EngineConfig(kv_memory="2000MiB")):
        with pytest.raises(ValueError, match=r"need 1\.95 GiB of memory, but 1000\.0 MiB is free; lower"):
            kv_blocks(config, [RANK])
    with pytest.raises(ValueError, match="raise --kv-memory"):
        kv_blocks(EngineConfig(kv_memory="1KiB"), [RANK])
    with pytest.raises(ValidationError, match="is no size; write it like 2GiB"):
        EngineConfig(kv_memory="lots")


def test_the_pool_is_described_in_tokens_and_requests() -> None:
    assert describe_pool(1024, 16, 8192) == (
        "16,384 tokens in 1,024 blocks of 16: 16 requests of 1,024 tokens, 2.0 of 8,192"
    )
