"""The KV pages of one rank: for each layer keys and values of [blocks, block_size, kv heads of this rank, head_dim]."""

from __future__ import annotations

import torch
from torch import Tensor


class KvCache:
    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError, in one line, where the memory cannot be had."""
        self.blocks, self.block_size = blocks, block_size
        shape = (blocks, block_size, kv_heads, head_dim)
        try:
            self.layers: list[tuple[Tensor, Tensor]] = [
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
                for _ in range(layers)
            ]
        except (RuntimeError, MemoryError) as error:
            need = blocks * bytes_per_block(layers, block_size, kv_heads, head_dim, dtype)
            reason = str(error).splitlines()[0]
            raise ValueError(f"{need / 2**30:.2f} GiB for KV cannot be had ({reason}); lower --kv-memory") from None


def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize
