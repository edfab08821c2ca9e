"""For kernels that read pages only of the type that they compute in: pages of another type are widened before.

Only the blocks that a forward reads, each once, of one layer at a time: memory is saved, not traffic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.attention.base import Attention, Layout
from workers.attention.once import OncePerForward
from workers.kv_cache import Pages


class WidenedAttention:
    reads_as_stored: ClassVar[bool] = False

    def __init__(self, kernel: Attention) -> None:
        self.name = kernel.name
        self._kernel = kernel
        self._read: OncePerForward[[int], tuple[Tensor, Layout]] = OncePerForward(_renumbered)

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        blocks, renumbered = self._read.of(layout, k_pages.block_size)
        keys, values = (Pages(pages.read(blocks, q.dtype)) for pages in (k_pages, v_pages))
        return self._kernel(q, keys, values, renumbered)


def _renumbered(layout: Layout, block_size: int) -> tuple[Tensor, Layout]:
    """The blocks that are read (int64), and the layout over these alone."""
    in_use = np.arange(layout.table.shape[1])[None] < -(-layout.used // block_size)[:, None]
    blocks, places = np.unique(layout.table[in_use], return_inverse=True)
    table = np.zeros_like(layout.table)
    table[in_use] = places
    device = layout.block_table.device
    on_device = torch.from_numpy(table).to(device, non_blocking=True)
    return torch.from_numpy(blocks.astype(np.int64)).to(device), replace(layout, block_table=on_device, table=table)
