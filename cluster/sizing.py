"""How many KV blocks a worker group gets, from what was asked for and the memory that is there."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import EngineConfig
from workers.config import WorkerDescription

CPU_DEFAULT_BYTES = 2 * 2**30
"""KV of a group on CPUs where nothing else was asked for: host memory is everybody's, so a modest share of it."""
CPU_DEFAULT_SHARE = 0.4


def kv_blocks(config: EngineConfig, ranks: Sequence[WorkerDescription]) -> int:
    """Blocks of one group whose ranks are described. Raises ValueError, in one line that says what to do, where the
    memory asked for is not there or does not hold a single block."""
    blocks = config.num_blocks or _blocks_by_memory(config, ranks)
    if blocks < 1:
        need = sum(_block(rank) for rank in ranks)
        raise ValueError(
            f"the KV memory does not hold one block of {ranks[0].block_size} tokens ({_size(need)}); raise --kv-memory"
        )
    _check_fits(blocks, ranks)
    return blocks


def describe_pool(blocks: int, block_size: int, max_model_len: int) -> str:
    """For a person: the pool in tokens, and in requests of a typical and of the greatest length."""
    tokens = blocks * block_size
    typical = min(1024, max_model_len)
    return (
        f"{tokens:,} tokens in {blocks:,} blocks of {block_size}: "
        f"{tokens // typical} requests of {typical:,} tokens, {tokens / max_model_len:.1f} of {max_model_len:,}"
    )


def _block(rank: WorkerDescription) -> int:
    """Bytes of a rank for one more block."""
    return rank.kv_bytes_per_block + rank.kv_reading_bytes_per_block


def _blocks_by_memory(config: EngineConfig, ranks: Sequence[WorkerDescription]) -> int:
    group_block = sum(_block(rank) for rank in ranks)
    if config.kv_memory is not None:
        return config.kv_memory // group_block
    if ranks[0].device.startswith("cuda"):
        return min(int(rank.free_bytes * config.gpu_memory_utilization) // _block(rank) for rank in ranks)
    share = int(CPU_DEFAULT_SHARE * min(rank.free_bytes for rank in ranks))
    return min(CPU_DEFAULT_BYTES, share) // group_block


def _check_fits(blocks: int, ranks: Sequence[WorkerDescription]) -> None:
    """On CUDA each rank has memory of its own; on CPU the ranks of a host share what is there."""
    if ranks[0].device.startswith("cuda"):
        needed, there = max((blocks * _block(rank), rank.free_bytes) for rank in ranks)
    else:
        needed = sum(blocks * _block(rank) for rank in ranks)
        there = min(rank.free_bytes for rank in ranks)
    if needed > there:
        raise ValueError(
            f"{blocks} KV blocks need {_size(needed)} of memory, but {_size(there)} is free; "
            f"lower --kv-memory or --num-blocks"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
