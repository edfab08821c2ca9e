"""Attention on CPU: one kernel over all single-token segments, and torch's flash kernel for each chunk.

A chunk on top of history is two exact calls, history without and the chunk with a causal mask, merged by their
log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workers.attention.base import Layout
from workers.attention.once import OncePerForward
from workers.attention.paged_decode import paged_decode
from workers.kv_cache import KvCache, Pages


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of the flat batch, and the sequence's KV: so many positions, in these blocks (int64)."""

    rows: slice
    used: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class _Parts:
    """A forward's single-token segments: their rows (None: they are all there is), block tables and KV positions; and
    its chunks."""

    single: Tensor | None
    table: Tensor
    used: Tensor
    chunks: tuple[_Chunk, ...]


class CpuAttention:
    name: ClassVar[str] = "cpu"
    reads_as_stored: ClassVar[bool] = True

    def __init__(self, kv_dtype: torch.dtype = torch.float32) -> None:
        """Compiles the kernel (or loads it from numba's cache), so that no request has to wait for that."""
        [(keys, values)] = KvCache(1, 1, 1, 1, 8, kv_dtype, torch.device("cpu")).layers
        one = torch.ones(1, dtype=torch.int32)
        paged_decode(torch.zeros(1, 1, 8), keys, values, torch.zeros(1, 1, dtype=torch.int32), one)
        self._parts: OncePerForward[_Parts] = OncePerForward(_parts)

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        parts = self._parts.of(layout, k_pages.block_size)
        if parts.single is None:
            return paged_decode(q, k_pages, v_pages, parts.table, parts.used)
        out = torch.empty_like(q)
        if len(parts.single):
            out[parts.single] = paged_decode(q[parts.single], k_pages, v_pages, parts.table, parts.used)
        for chunk in parts.chunks:
            k, v = (_gather(pages, chunk, q.dtype) for pages in (k_pages, v_pages))
            out[chunk.rows] = _chunk(q[chunk.rows], k, v)
        return out


def _parts(layout: Layout, block_size: int) -> _Parts:
    single = layout.counts == 1
    if single.all():
        return _Parts(None, layout.block_table, layout.seqused_k, ())
    first_rows = (layout.counts.cumsum() - layout.counts).astype("int64")
    which = torch.from_numpy(single.nonzero()[0])
    chunks = []
    for i in (~single).nonzero()[0].tolist():
        row, used = int(first_rows[i]), int(layout.used[i])
        blocks = layout.block_table[i, : -(-used // block_size)].long()
        chunks.append(_Chunk(slice(row, row + int(layout.counts[i])), used, blocks))
    rows = torch.from_numpy(first_rows[single])
    return _Parts(rows, layout.block_table[which], layout.seqused_k[which], tuple(chunks))


def _gather(pages: Pages, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    """[used, kv heads, head_dim] of one sequence, from its pages."""
    return pages.read(chunk.blocks, dtype).flatten(0, 1)[: chunk.used]


def _chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries [c, heads, d] are the last c of the [s, kv heads, d] keys and values."""
    count, heads, head_dim = q.shape
    history, kv_heads = k.shape[0] - count, k.shape[1]
    groups = heads // kv_heads
    own_k, own_v = (x[history:].repeat_interleave(groups, dim=1).transpose(0, 1).unsqueeze(0) for x in (k, v))
    own, own_lse = _flash(q.transpose(0, 1).unsqueeze(0), own_k, own_v, causal=True)
    if history == 0:
        return own[0].transpose(0, 1)
    # Without a causal mask the query heads that share a KV head are just more rows of it: a long history need not be
    # repeated for each of them, which would cost more than the attention itself.
    rows = q.view(count, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * count, head_dim)
    past_k, past_v = (x[:history].transpose(0, 1).unsqueeze(0) for x in (k, v))
    past, past_lse = _flash(rows, past_k, past_v, causal=False)
    past, past_lse = past.reshape(1, heads, count, head_dim), past_lse.reshape(1, heads, count)
    # softmax over both parts = each part's softmax weighted by its share of the total exponential sum
    weight = torch.sigmoid(past_lse - own_lse).unsqueeze(-1)
    merged: Tensor = torch.lerp(own, past, weight)
    return merged[0].transpose(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[1, heads, rows, d] and the log-sum-exp [1, heads, rows] of each row's scores."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse
