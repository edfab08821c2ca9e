"""Attention on CPU: one kernel over all single-token segments, and one over all chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.attention.base import Layout
from workers.attention.once import OncePerForward
from workers.attention.paged_chunk import Chunks, paged_chunk
from workers.attention.paged_decode import paged_decode
from workers.kv_cache import KvCache, Pages


@dataclass(frozen=True, slots=True)
class _Parts:
    """A forward's single-token segments: their rows, block tables and KV positions; and its chunks, if it has any."""

    rows: Tensor
    table: Tensor
    used: Tensor
    chunks: Chunks | None


class CpuAttention:
    name: ClassVar[str] = "cpu"
    reads_as_stored: ClassVar[bool] = True

    def __init__(self, kv_dtype: torch.dtype = torch.float32) -> None:
        """Compiles the kernel of chunks (or loads it from numba's cache), so that no request has to wait for that. That
        of decodes is made for the model, whose first iteration is at the start too."""
        self._parts: OncePerForward[[int, int], _Parts] = OncePerForward(_parts)
        [(keys, values)] = KvCache(1, 1, 2, 1, 8, kv_dtype, torch.device("cpu")).layers
        queries, two = torch.zeros(2, 1, 8), np.full(1, 2, np.int32)
        chunk = Chunks(np.zeros(1, np.int32), two, two, np.zeros((1, 1), np.int32), 1, 1)
        paged_chunk(queries, keys, values, chunk, torch.empty_like(queries))

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        parts = self._parts.of(layout, q.shape[1], k_pages.kv_heads)
        if parts.chunks is None:
            return paged_decode(q, k_pages, v_pages, parts.table, parts.used)
        out = torch.empty_like(q)
        if len(parts.rows):
            out[parts.rows] = paged_decode(q[parts.rows], k_pages, v_pages, parts.table, parts.used)
        paged_chunk(q, k_pages, v_pages, parts.chunks, out)
        return out


def _parts(layout: Layout, heads: int, kv_heads: int) -> _Parts:
    single = layout.counts == 1
    first_rows = (layout.counts.cumsum() - layout.counts).astype(np.int32)
    which = torch.from_numpy(single.nonzero()[0])
    rows = torch.from_numpy(first_rows[single].astype(np.int64))
    chunks = None
    if not single.all():
        firsts, counts, used, table = (x[~single] for x in (first_rows, layout.counts, layout.used, layout.table))
        chunks = Chunks(firsts, counts, used, table, kv_heads, heads // kv_heads)
    return _Parts(rows, layout.block_table[which], layout.seqused_k[which], chunks)
