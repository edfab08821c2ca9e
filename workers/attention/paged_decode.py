"""Attention of one query a sequence over paged KV: a numba kernel over all sequences at once, and the same in torch."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from workers.kv_cache import Pages
from workers.threads import as_many_threads_as_torch


def paged_decode(q: Tensor, k_pages: Pages, v_pages: Pages, block_table: Tensor, used: Tensor) -> Tensor:
    """q [n, heads, d]; pages [blocks, block_size, kv heads, d]; block_table [n, most]; used [n] -> [n, heads, d]."""
    if q.dtype != torch.float32:
        return paged_decode_torch(q, k_pages, v_pages, block_table, used)
    out = torch.empty_like(q)
    scale = np.float32(1.0 / math.sqrt(q.shape[2]))
    as_many_threads_as_torch()
    pages = *as_arrays(k_pages), *as_arrays(v_pages)
    _kernel(q.contiguous().numpy(), *pages, block_table.numpy(), used.numpy(), out.numpy(), scale)
    return out


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


_ONE = torch.ones(1)
_AS_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""numba has neither of these types on CPU: it gets their bits, by which it knows them apart."""


def as_arrays(pages: Pages) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Values and scales as a kernel takes them; where there are none, ones that take no memory."""
    values = pages.values
    bits = _AS_BITS.get(values.dtype)
    scales = _ONE.expand(values.shape[:3]) if pages.scales is None else pages.scales
    return (values if bits is None else values.view(bits)).numpy(), scales.numpy()


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(numba.float32))

    return numba.float32(numba.uint32), build


def widened(value: Any) -> Any:
    """A page's element, of numpy, as float32, but for its scale. What it is follows from its type (see `_AS_BITS`).
    Kernels are compiled with what is below instead."""
    if value.dtype == np.uint16:
        return (np.uint32(value) << np.uint32(16)).view(np.float32)
    return np.float32(value.view(np.float16) if value.dtype == np.int16 else value)


float_of_bits: Any = _as_float


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


def _paged_decode(
    q: Any, keys: Any, key_scales: Any, values: Any, value_scales: Any, table: Any, used: Any, out: Any, scale: Any
) -> None:
    """One task for each sequence and KV head: scores of its query heads, softmax, weighted sum."""
    n, heads, d = q.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    groups = heads // kv_heads
    for task in numba.prange(n * kv_heads):
        s, h = task // kv_heads, task % kv_heads
        length = used[s]
        scores = np.empty((groups, length), dtype=np.float32)
        for t in range(length):
            block, offset = table[s, t // block_size], t % block_size
            key, worth = keys[block, offset, h], key_scales[block, offset, h]
            for g in range(groups):
                query = q[s, h * groups + g]
                dot = np.float32(0.0)
                for j in range(d):
                    dot += query[j] * widened(key[j])
                scores[g, t] = dot * scale * worth
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
                block, offset = table[s, t // block_size], t % block_size
                value = values[block, offset, h]
                p = row[t] * value_scales[block, offset, h]
                for j in range(d):
                    acc[j] += p * widened(value[j])
            for j in range(d):
                acc[j] /= total


_kernel: Any = numba.njit(parallel=True, fastmath=True, cache=True)(_paged_decode)
