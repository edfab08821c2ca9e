"""KV blocks of one rank in host memory, for sequences that gave way and come back."""

from __future__ import annotations

import torch
from torch import Tensor

from scheduler.plan import Swap
from workers.kv_cache import KvCache
from workers.slots import PlanError


class HostCache:
    """As many bytes a block as in the cache. Pinned where the cache is on a GPU, so that copies need no detour."""

    def __init__(self, cache: KvCache, blocks: int) -> None:
        """Raises ValueError, in one line, where the memory cannot be had."""
        self._cache = cache
        self.blocks = blocks
        try:
            self.planes = [_host_plane(plane, blocks) for plane in cache.planes]
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"memory for --preempt swap cannot be had ({reason}); lower --swap-memory") from None

    def carry_out(self, swap: Swap) -> None:
        """Copies pair by pair, so that a block may be copied out and overwritten by a later one. On a GPU nobody waits
        for them: they stand in line with its forwards. Raises PlanError for blocks that do not exist."""
        there = zip(swap.blocks, swap.host_blocks, strict=True)
        if not all(0 <= block < self._cache.blocks and 0 <= host < self.blocks for block, host in there):
            raise PlanError(f"a swap of blocks outside the pools of {self._cache.blocks} and {self.blocks}")
        for block, host in zip(swap.blocks, swap.host_blocks, strict=True):
            for plane, kept in zip(self._cache.planes, self.planes, strict=True):
                source, target = plane[:, :, block], kept[host]
                if not swap.to_host:
                    source, target = target, source
                target.copy_(source, non_blocking=True)


def _host_plane(plane: Tensor, blocks: int) -> Tensor:
    """[blocks, layers, 2, ...]: a block lies in one piece."""
    shape = (blocks, *plane.shape[:2], *plane.shape[3:])
    return torch.empty(shape, dtype=plane.dtype, pin_memory=plane.device.type == "cuda")
