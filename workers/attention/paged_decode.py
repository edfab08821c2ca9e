"""Attention of one query a sequence over paged KV: a numba kernel over all sequences at once, and the same in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from workers.floats import exp, float_of_bits
from workers.kv_cache import Pages
from workers.threads import as_many_threads_as_torch
from workers.vectors import Vectors

TASKS_OF_THREAD = 4
"""From so many sequences a thread on, all heads of one are one task, which reads its blocks from beginning to end."""


@dataclass(frozen=True)
class Singles:
    """Of each sequence that has one query: its row in the flat batch, int64 [n]; block table [n, most] and KV positions
    [n]."""

    rows: Tensor
    table: Tensor
    used: Tensor

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        return self.rows.numpy(), self.table.numpy(), self.used.numpy()


def paged_decode(
    q: NDArray[np.float32], k_pages: Pages, v_pages: Pages, singles: Singles, out: NDArray[np.float32]
) -> None:
    """q, out [tokens, heads, d], of which the singles' rows are read and written; pages [blocks, block_size, kv heads,
    d]."""
    as_many_threads_as_torch()
    rows, table, used = singles.arrays
    kv_heads, (_, heads, d) = k_pages.kv_heads, q.shape
    parts = 1 if len(rows) >= TASKS_OF_THREAD * torch.get_num_threads() else kv_heads
    kernel = _kernel_for(heads // kv_heads, d)
    kernel(q, *k_pages.arrays, *v_pages.arrays, rows, table, used, out, np.float32(1.0 / math.sqrt(d)), parts)


def paged_decode_torch(q: Tensor, k_pages: Pages, v_pages: Pages, block_table: Tensor, used: Tensor) -> Tensor:
    """The plain path: pages gathered to the longest sequence, one batched attention with a mask."""
    n, heads, _ = q.shape
    block_size, kv_heads = k_pages.block_size, k_pages.kv_heads
    most = -(-int(used.max()) // block_size)
    table = block_table[:, :most].long()
    k = k_pages.read(table, q.dtype).flatten(1, 2).repeat_interleave(heads // kv_heads, dim=2)
    v = v_pages.read(table, q.dtype).flatten(1, 2).repeat_interleave(heads // kv_heads, dim=2)
    mask = torch.arange(most * block_size, device=q.device)[None] < used[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.view(n, 1, 1, -1)
    )
    return out.squeeze(2)


def widened(value: Any) -> Any:
    """A page's element, of numpy, as float32, but for its scale. What it is follows from its type (see `Pages.arrays`).
    Kernels are compiled with what is below instead."""
    if value.dtype == np.uint16:
        return (np.uint32(value) << np.uint32(16)).view(np.float32)
    return np.float32(value.view(np.float16) if value.dtype == np.int16 else value)


@overload(widened, inline="always")
def _compile_widened(value: Any) -> Any:
    if value == numba.uint16:  # bfloat16: the upper half of a float32

        def bfloat16(value: Any) -> Any:
            return float_of_bits(np.uint32(value) << np.uint32(16))

        return bfloat16
    if value == numba.int16:  # float16: its exponent is biased by 112 less

        def float16(value: Any) -> Any:
            bits = np.uint32(np.uint16(value))
            sign = (bits & np.uint32(0x8000)) << np.uint32(16)
            return float_of_bits(sign | (bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)

        return float16

    def number(value: Any) -> Any:
        return np.float32(value)

    return number


def _fetch(typing: Any, pages: Any, block: Any, offset: Any, head: Any) -> Any:
    """Have a head's key or value, pages[block, offset, head], read into the cache."""
    signature = types.void(pages, types.intp, types.intp, types.intp)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature, arguments)
        vectors.fetch_all(*vectors.row(0, arguments[1:]))
        return context.get_dummy_value()

    return signature, build


fetch: Any = intrinsic(_fetch)


@numba.njit(inline="always")
def _fetch_next(
    pages: Any, blocks: Any, following: Any, count: Any, then: Any, first: Any, offset: Any, head: Any
) -> None:
    """Of the block after this one; after the last of `count`, of the first block of what comes `then`. Blocks lie
    anywhere, so that the processor cannot foresee which is next."""
    if following < count:
        fetch(pages, blocks[following], offset, head)
    else:
        fetch(then, first, offset, head)


@lru_cache
def _kernel_for(groups: int, d: int) -> Any:
    """For `groups` query heads that share a KV head of `d` numbers. Loops of a length that is known when they are
    compiled become a few vector instructions each, which is most of the kernel's speed."""

    def paged_decode_kernel(
        q: Any,
        keys: Any,
        key_scales: Any,
        values: Any,
        value_scales: Any,
        rows: Any,
        table: Any,
        used: Any,
        out: Any,
        scale: Any,
        parts: Any,
    ) -> None:
        """A task for each sequence and part of its KV heads: scores of their query heads, softmax, weighted sum. Keys
        and values are fetched one block ahead."""
        n, block_size, kv_heads = len(rows), keys.shape[1], keys.shape[2]
        own = kv_heads // parts
        for task in numba.prange(n * parts):
            s, first_head = task // parts, task % parts * own
            length, blocks, after = used[s], table[s], table[min(s + 1, n - 1), 0]
            row = rows[s]
            count = (length + block_size - 1) // block_size
            scores = np.empty((own * groups, length), dtype=np.float32)
            for b in range(count):
                block, start = blocks[b], b * block_size
                for offset in range(min(block_size, length - start)):
                    for h in range(first_head, first_head + own):
                        _fetch_next(keys, blocks, b + 1, count, values, blocks[0], offset, h)
                        key, worth = keys[block, offset, h], key_scales[block, offset, h] * scale
                        for g in range(groups):
                            query = q[row, h * groups + g]
                            dot = np.float32(0.0)
                            for j in range(d):
                                dot += query[j] * widened(key[j])
                            scores[(h - first_head) * groups + g, start + offset] = dot * worth
            for g in range(own * groups):
                weights = scores[g]
                top = weights[0]
                for t in range(length):
                    top = max(top, weights[t])
                total = np.float32(0.0)
                for t in range(length):
                    weights[t] = exp(weights[t] - top)
                    total += weights[t]
                share = np.float32(1.0) / total
                for t in range(length):
                    weights[t] *= share
            out[row, first_head * groups : (first_head + own) * groups] = 0.0
            for b in range(count):
                block, start = blocks[b], b * block_size
                for offset in range(min(block_size, length - start)):
                    for h in range(first_head, first_head + own):
                        _fetch_next(values, blocks, b + 1, count, keys, after, offset, h)
                        value, worth = values[block, offset, h], value_scales[block, offset, h]
                        for g in range(groups):
                            p = scores[(h - first_head) * groups + g, start + offset] * worth
                            acc = out[row, h * groups + g]
                            for j in range(d):
                                acc[j] += p * widened(value[j])

    return numba.njit(parallel=True, fastmath={"contract", "reassoc", "nsz"}, cache=True)(paged_decode_kernel)
