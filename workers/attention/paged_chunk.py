"""Attention of chunks of queries over paged KV: a numba kernel over all chunks at once, and the same in torch.

A task takes some neighbouring queries of one KV head, those of all query heads that share it, as columns of panels, and
goes through the keys before them tile by tile: scores, a step of the softmax, weighted sum (Dao and others,
FlashAttention, 2022). A query's tiles begin at position 0 whatever its chunk: its result does not depend on how
its prompt is cut. (A piece of one token is a decode's kernel's, which rounds otherwise.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.blocks import scores_block, soften, values_block
from workers.attention.paged_decode import fetch, widened
from workers.kv_cache import Pages
from workers.threads import as_many_threads_as_torch
from workers.vectors import LANES, PANEL, ROWS, VECTORS

TILE = 64
"""Keys of a tile: it, a panel of queries and one of sums stay in the processor's first cache."""
SIZES = tuple(vectors * LANES for vectors in (4 * VECTORS, 2 * VECTORS, VECTORS, 2, 1))
"""Of a task, in columns: each tile is copied out of its pages once for all of them."""
COPY = 2 * LANES
"""Columns that are as much work as that."""


@dataclass(frozen=True)
class Chunks:
    """Of each chunk, int32 [n]: its first row in the flat batch, its queries, its KV positions; and block tables [n,
    most]. `groups` query heads share each of the `kv_heads`."""

    first_rows: NDArray[np.int32]
    counts: NDArray[np.int32]
    used: NDArray[np.int32]
    table: NDArray[np.int32]
    kv_heads: int
    groups: int

    @cached_property
    def tasks(self) -> tuple[NDArray[np.int32], int]:
        """Of every KV head, [tasks, 2], chunk and first of its columns, the longest first, and how many columns each
        has at most: of the sizes the one with which the threads are done first. The same in all layers."""
        workers = torch.get_num_threads()
        _, tasks, size = min((self._tasks_of(size, workers) for size in SIZES), key=lambda found: found[0])
        return tasks, size

    def _tasks_of(self, size: int, workers: int) -> tuple[int, NDArray[np.int32], int]:
        """How much work the thread that has most of it gets, the tasks, and the size."""
        columns = self.counts * self.groups
        per_chunk = -(-columns // size)
        chunk = np.repeat(np.arange(len(columns)), per_chunk)
        first = (np.arange(len(chunk)) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)) * size
        some = np.minimum(size, columns[chunk] - first)
        keys = (self.used - self.counts)[chunk] + (first + some - 1) // self.groups + 1
        work = keys * (-(-some // LANES) * LANES + COPY)
        order = np.argsort(-work, kind="stable")
        of_worker = np.arange(len(order) * self.kv_heads) % workers
        most = np.bincount(of_worker, np.repeat(work[order], self.kv_heads)).max(initial=0)
        return int(most), np.stack([chunk, first], axis=1)[order].astype(np.int32), size


def paged_chunk(
    q: NDArray[np.float32], k_pages: Pages, v_pages: Pages, chunks: Chunks, out: NDArray[np.float32]
) -> None:
    """q, out [tokens, heads, d], of which the chunks' rows are read and written; pages [blocks, block_size, kv heads,
    d]. Every chunk's queries are the last of its KV positions."""
    as_many_threads_as_torch()
    tasks, size = chunks.tasks
    of_chunks = chunks.first_rows, chunks.counts, chunks.used, chunks.table
    scale = np.float32(1.0 / math.sqrt(q.shape[2]))
    _kernel(q, *k_pages.arrays, *v_pages.arrays, *of_chunks, tasks, out, size, torch.get_num_threads(), scale)


def paged_chunk_torch(q: Tensor, k_pages: Pages, v_pages: Pages, chunks: Chunks, out: Tensor) -> None:
    """The plain path: of each chunk the pages gathered, and two exact calls of torch's own kernel."""
    for row, count, used, table in zip(chunks.first_rows, chunks.counts, chunks.used, chunks.table, strict=True):
        blocks = torch.from_numpy(table[: -(-used // k_pages.block_size)].astype(np.int64))
        k, v = (pages.read(blocks, q.dtype).flatten(0, 1)[:used] for pages in (k_pages, v_pages))
        out[row : row + count] = _chunk(q[row : row + count], k, v)


def _chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries [c, heads, d] are the last c of the [s, kv heads, d] keys and values: history without and the chunk with
    a causal mask, merged by their log-sum-exp."""
    count, heads, head_dim = q.shape
    history, kv_heads = k.shape[0] - count, k.shape[1]
    groups = heads // kv_heads
    own_k, own_v = (x[history:].repeat_interleave(groups, dim=1).transpose(0, 1).unsqueeze(0) for x in (k, v))
    own, own_lse = _flash(q.transpose(0, 1).unsqueeze(0), own_k, own_v, causal=True)
    if history == 0:
        return own[0].transpose(0, 1)
    # Without a causal mask the query heads that share a KV head are just more rows of it.
    rows = q.view(count, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * count, head_dim)
    past_k, past_v = (x[:history].transpose(0, 1).unsqueeze(0) for x in (k, v))
    past, past_lse = _flash(rows, past_k, past_v, causal=False)
    past, past_lse = past.reshape(1, heads, count, head_dim), past_lse.reshape(1, heads, count)
    # softmax over both parts = each part's softmax weighted by its share of the total exponential sum
    weight = torch.sigmoid(past_lse - own_lse).unsqueeze(-1)
    merged: Tensor = torch.lerp(own, past.to(own.dtype), weight.to(own.dtype))
    return merged[0].transpose(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[1, heads, rows, d] and the log-sum-exp [1, heads, rows] of each row's scores."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


_LEAST = np.float32(-1e30)
"""Below every score, and yet a number that can be subtracted from itself."""


@numba.njit(inline="always")
def _copy_tile(
    pages: Any, scales: Any, blocks: Any, start: Any, count: Any, end: Any, head: Any, tile: Any, width: Any
) -> None:
    """Of one head the keys (or values) from position `start` on, side by side, while those a tile later are fetched."""
    block_size, d = pages.shape[1], pages.shape[3]
    b, offset = start // block_size, start % block_size
    later, beside = (start + TILE) // block_size, (start + TILE) % block_size
    for t in range(count):
        if start + t + TILE < end:
            fetch(pages, blocks[later], beside, head)
        row, worth = pages[blocks[b], offset, head], scales[blocks[b], offset, head]
        at = t * width
        for j in range(d):
            tile[at + j] = widened(row[j]) * worth
        offset, beside = offset + 1, beside + 1
        if offset == block_size:
            b, offset = b + 1, 0
        if beside == block_size:
            later, beside = later + 1, 0


def _paged_chunk(
    q: Any,
    keys: Any,
    key_scales: Any,
    values: Any,
    value_scales: Any,
    first_rows: Any,
    counts: Any,
    used: Any,
    table: Any,
    tasks: Any,
    out: Any,
    size: Any,
    workers: Any,
    scale: Any,
) -> None:
    """Column m of a chunk is its query m // groups, of query head m % groups of those that share the KV head."""
    heads, d = q.shape[1], q.shape[2]
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    width, panels = -(-d // ROWS) * ROWS, -(-size // PANEL)
    for worker in numba.prange(workers):
        queries = np.zeros(panels * d * PANEL, dtype=np.float32)
        sums = np.zeros(panels * width * PANEL, dtype=np.float32)
        tops, totals = np.zeros(panels * PANEL, dtype=np.float32), np.zeros(panels * PANEL, dtype=np.float32)
        key_tile, value_tile = np.zeros(TILE * d, dtype=np.float32), np.zeros(TILE * width, dtype=np.float32)
        scores = np.zeros(TILE * PANEL, dtype=np.float32)
        for task in range(worker, len(tasks) * kv_heads, workers):
            c, first, h = tasks[task // kv_heads, 0], tasks[task // kv_heads, 1], task % kv_heads
            row, history = first_rows[c], used[c] - counts[c]
            columns = min(size, counts[c] * groups - first)
            sums[:], tops[:], totals[:], queries[:] = 0.0, _LEAST, 0.0, 0.0
            for m in range(columns):
                query = q[row + (first + m) // groups, h * groups + (first + m) % groups]
                at = m // PANEL * d * PANEL + m % PANEL
                for j in range(d):
                    queries[at + j * PANEL] = query[j] * scale
            end = history + (first + columns - 1) // groups + 1
            for start in range(0, end, TILE):
                count = min(TILE, end - start)
                _copy_tile(keys, key_scales, table[c], start, count, end, h, key_tile, d)
                _copy_tile(values, value_scales, table[c], start, count, end, h, value_tile, width)
                for p in range(-(-columns // PANEL)):
                    begin = first + p * PANEL
                    wide = -(-min(PANEL, columns - p * PANEL) // LANES)
                    seen_by_all = history + begin // groups + 1 - start
                    seen = min(count, history + (min(begin + PANEL, first + columns) - 1) // groups + 1 - start)
                    if seen <= 0:
                        continue
                    for t in range(0, seen, ROWS):
                        scores_block(key_tile, t * d, d, queries, p * d * PANEL, d, scores, t * PANEL, wide)
                    for t in range(max(0, seen_by_all), seen):
                        # Of key t the queries before it know nothing.
                        for m in range(min(PANEL, (start + t - history) * groups - begin)):
                            scores[t * PANEL + m] = _LEAST
                    soften(scores, seen, tops, totals, p * PANEL, sums, p * width * PANEL, width, wide)
                    for j in range(0, width, ROWS):
                        values_block(value_tile, j, width, scores, seen, sums, (p * width + j) * PANEL, wide)
            for m in range(columns):
                result = out[row + (first + m) // groups, h * groups + (first + m) % groups]
                at = m // PANEL * width * PANEL + m % PANEL
                for j in range(d):
                    result[j] = sums[at + j * PANEL] / totals[m]


_kernel: Any = numba.njit(parallel=True, fastmath={"contract"}, cache=True)(_paged_chunk)
