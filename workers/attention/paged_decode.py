"""Attention of one query a sequence over paged KV: a numba kernel over all sequences at once, and the same in torch."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

# OpenMP is the layer that several threads of one process may call at once.
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]


def paged_decode(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, used: Tensor) -> Tensor:
    """q [n, heads, d]; pages [blocks, block_size, kv heads, d]; block_table [n, most]; used [n] -> [n, heads, d]."""
    if q.dtype != torch.float32:
        return paged_decode_torch(q, k_pages, v_pages, block_table, used)
    out = torch.empty_like(q)
    scale = np.float32(1.0 / math.sqrt(q.shape[2]))
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    arrays = (x.numpy() for x in (q.contiguous(), k_pages, v_pages, block_table, used, out))
    _kernel(*arrays, scale)
    return out


def paged_decode_torch(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, used: Tensor) -> Tensor:
    """The plain path: pages gathered to the longest sequence, one batched attention with a mask."""
    n, heads, _ = q.shape
    block_size, kv_heads = k_pages.shape[1:3]
    most = -(-int(used.max()) // block_size)
    table = block_table[:, :most].long()
    k = k_pages[table].flatten(1, 2).repeat_interleave(heads // kv_heads, dim=2)
    v = v_pages[table].flatten(1, 2).repeat_interleave(heads // kv_heads, dim=2)
    mask = torch.arange(most * block_size, device=q.device)[None] < used[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.view(n, 1, 1, -1)
    )
    return out.squeeze(2)


def _paged_decode(q: Any, k_pages: Any, v_pages: Any, block_table: Any, used: Any, out: Any, scale: Any) -> None:
    """One task for each sequence and KV head: scores of its query heads, softmax, weighted sum."""
    n, heads, d = q.shape
    block_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    groups = heads // kv_heads
    for task in numba.prange(n * kv_heads):
        s, h = task // kv_heads, task % kv_heads
        length = used[s]
        scores = np.empty((groups, length), dtype=np.float32)
        for t in range(length):
            key = k_pages[block_table[s, t // block_size], t % block_size, h]
            for g in range(groups):
                query = q[s, h * groups + g]
                dot = np.float32(0.0)
                for j in range(d):
                    dot += query[j] * key[j]
                scores[g, t] = dot * scale
        for g in range(groups):
            row = scores[g]
            top = row.max()
            total = np.float32(0.0)
            for t in range(length):
                row[t] = np.exp(row[t] - top)
                total += row[t]
            acc = out[s, h * groups + g]
            acc[:] = 0.0
            for t in range(length):
                value = v_pages[block_table[s, t // block_size], t % block_size, h]
                p = row[t]
                for j in range(d):
                    acc[j] += p * value[j]
            for j in range(d):
                acc[j] /= total


_kernel: Any = numba.njit(parallel=True, fastmath=True, cache=True)(_paged_decode)
