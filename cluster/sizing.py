"""How many KV blocks a worker group gets, from what was asked for and the memory that weights and iterations leave."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import EngineConfig
from workers.config import WorkerDescription

CPU_DEFAULT_BYTES = 2 * 2**30
"""KV of a group on CPUs where nothing else was asked for: host memory is everybody's, so a modest share of it."""
CPU_DEFAULT_SHARE = 0.4
SWAP_DEFAULT_SHARE = 0.25


def kv_blocks(config: EngineConfig, ranks: Sequence[WorkerDescription]) -> int:
    """Blocks of one group whose ranks are described. Raises ValueError, in one line that says what to do, where the
    memory asked for is not there or does not hold a single block."""
    blocks = config.num_blocks or _blocks_by_memory(config, ranks)
    if blocks < 1:
        need = sum(_block(rank) for rank in ranks)
        raise ValueError(
            f"the KV memory does not hold one block of {ranks[0].block_size} tokens ({size(need)}); "
            f"raise --kv-memory{' or lower --block-size' if config.block_size else ''}"
        )
    _check_fits(blocks, ranks)
    return blocks


def swap_blocks(config: EngineConfig, ranks: Sequence[WorkerDescription], num_blocks: int) -> int:
    """Blocks of host memory for those that give way; none where they compute again. By default as many as the pool has,
    but no more than a modest share of what is free besides.

    Raises ValueError, in one line, where the memory asked for is not there or does not hold a single block.
    """
    if config.preempt != "swap":
        return 0
    group_block = sum(rank.kv_bytes_per_block for rank in ranks)
    if ranks[0].device.startswith("cuda"):
        free = min(rank.host_free_bytes for rank in ranks)
    else:
        free = _free_on_host(ranks) - num_blocks * group_block
    wanted = config.swap_memory
    if wanted is None:
        wanted = min(num_blocks * group_block, int(SWAP_DEFAULT_SHARE * free))
    elif wanted > free:
        raise ValueError(f"--swap-memory {size(wanted)} is not there: {size(max(0, free))} of host memory is free")
    if wanted < group_block:
        raise ValueError(
            f"{size(max(0, wanted))} of host memory holds no block of {size(group_block)}; raise --swap-memory"
        )
    return wanted // group_block


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
        return min(
            (int(rank.free_bytes * config.gpu_memory_utilization) - rank.iteration_bytes) // _block(rank)
            for rank in ranks
        )
    share = int(CPU_DEFAULT_SHARE * _free_on_host(ranks))
    return min(CPU_DEFAULT_BYTES, share) // group_block


def _free_on_host(ranks: Sequence[WorkerDescription]) -> int:
    """What a group on CPUs may take for KV: its ranks share the host's memory, and each computes iterations in it."""
    return min(rank.free_bytes for rank in ranks) - sum(rank.iteration_bytes for rank in ranks)


def _check_fits(blocks: int, ranks: Sequence[WorkerDescription]) -> None:
    """On CUDA each rank has memory of its own; on CPU the ranks of a host share what is there."""
    if ranks[0].device.startswith("cuda"):
        needed, there = max((blocks * _block(rank), rank.free_bytes - rank.iteration_bytes) for rank in ranks)
    else:
        needed = sum(blocks * _block(rank) for rank in ranks)
        there = _free_on_host(ranks)
    if needed > there:
        raise ValueError(
            f"{blocks} KV blocks need {size(needed)} of memory, but {size(max(0, there))} is free beside the weights "
            f"and an iteration; lower --kv-memory or --num-blocks"
        )


def size(count: int) -> str:
    """Of bytes, for a person."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
