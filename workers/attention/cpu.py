"""Attention on CPU: one kernel over all single-token segments, and one over all chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.base import Layout
from workers.attention.once import OncePerForward
from workers.attention.paged_chunk import Chunks, paged_chunk, paged_chunk_torch
from workers.attention.paged_decode import Singles, paged_decode, paged_decode_torch
from workers.kv_cache import KvCache, Pages


@dataclass(frozen=True, slots=True)
class _Parts:
    """A forward's single-token segments and its chunks, where it has any."""

    singles: Singles | None
    chunks: Chunks | None


class CpuAttention:
    name: ClassVar[str] = "cpu"
    reads_as_stored: ClassVar[bool] = True

    def __init__(self, kv_dtype: torch.dtype = torch.float32) -> None:
        """Compiles the kernel of chunks (or loads it from numba's cache), so that no request has to wait for that. That
        of decodes is made for the model, whose first iteration is at the start too."""
        self._parts: OncePerForward[[int, int], _Parts] = OncePerForward(_parts)
        [(keys, values)] = KvCache(1, 1, 2, 1, 8, kv_dtype, torch.device("cpu")).layers
        queries, two = np.zeros((2, 1, 8), np.float32), np.full(1, 2, np.int32)
        chunk = Chunks(np.zeros(1, np.int32), two, two, np.zeros((1, 1), np.int32), 1, 1)
        paged_chunk(queries, keys, values, chunk, np.empty_like(queries))

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if q.dtype == torch.float32:
            self.into(q.contiguous().numpy(), k_pages, v_pages, layout, out.numpy())
            return out
        parts = self._parts.of(layout, q.shape[1], k_pages.kv_heads)
        if (singles := parts.singles) is not None:
            of_singles = paged_decode_torch(q[singles.rows], k_pages, v_pages, singles.table, singles.used)
            out[singles.rows] = of_singles
        if parts.chunks is not None:
            paged_chunk_torch(q, k_pages, v_pages, parts.chunks, out)
        return out

    def into(
        self,
        q: NDArray[np.float32],
        k_pages: Pages,
        v_pages: Pages,
        layout: Layout,
        out: NDArray[np.float32],
        rows: Tensor | None = None,
    ) -> None:
        """As a call, of arrays. With `rows`, only segments that have some of them."""
        heads = q.shape[1], k_pages.kv_heads
        parts = self._parts.of(layout, *heads)
        if rows is not None:
            parts = _parts_of(rows.numpy(), parts, layout, *heads)
        if parts.singles is not None:
            paged_decode(q, k_pages, v_pages, parts.singles, out)
        if parts.chunks is not None:
            paged_chunk(q, k_pages, v_pages, parts.chunks, out)


def _parts_of(rows: NDArray[np.int64], parts: _Parts, layout: Layout, heads: int, kv_heads: int) -> _Parts:
    """Of these the segments that have some of the rows. Decodes have, and chunks in the middle of a prompt have not:
    then nothing is made anew."""
    asked = np.zeros(len(layout.counts), dtype=np.bool_)
    asked[np.searchsorted(layout.counts.cumsum(), rows, side="right")] = True
    if asked.all():
        return parts
    if np.array_equal(asked, layout.counts == 1):
        return _Parts(parts.singles, None)
    return _parts(layout, heads, kv_heads, asked)


def _parts(layout: Layout, heads: int, kv_heads: int, asked: NDArray[np.bool_] | None = None) -> _Parts:
    """Of the segments that are `asked` for."""
    first_rows = (layout.counts.cumsum() - layout.counts).astype(np.int32)
    if asked is None:
        asked = np.ones(len(first_rows), dtype=np.bool_)
    single, several = asked & (layout.counts == 1), asked & (layout.counts > 1)
    singles = chunks = None
    if single.any():
        which, rows_of = (torch.from_numpy(x) for x in (single.nonzero()[0], first_rows[single].astype(np.int64)))
        singles = Singles(rows_of, layout.block_table[which], layout.seqused_k[which])
    if several.any():
        firsts, counts, used, table = (x[several] for x in (first_rows, layout.counts, layout.used, layout.table))
        chunks = Chunks(firsts, counts, used, table, kv_heads, heads // kv_heads)
    return _Parts(singles, chunks)
