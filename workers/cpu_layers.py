"""The layers of a forward in float32 on a CPU: the kernels of `layer_kernels` and `attention`, one after the other,
over arrays that each layer finds where the one before left them.

A layer by itself (`workers/layer.py`) makes some twenty tensors and views of them: as much time as some kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention import Layout
from workers.attention.cpu import CpuAttention
from workers.elementwise import NOTHING
from workers.kv_cache import KvCache, Pages
from workers.layer import Layer
from workers.layer_kernels import after_attention, before_attention, feed_forward, project
from workers.packed import rows_of_task
from workers.parallel import Ranks
from workers.shard import Shard
from workers.threads import as_many_threads_as_torch

Array: TypeAlias = NDArray[np.float32]


class CpuLayers:
    """All of a model's layers, where their weights are packed (`workers/linear.py`)."""

    def __init__(self, layers: Sequence[Layer], ranks: Ranks) -> None:
        self._layers = [_CpuLayer(layer, ranks) for layer in layers]
        self._shard = layers[0].shard

    @staticmethod
    def take(layers: Sequence[Layer]) -> bool:
        linears = [linear for layer in layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return bool(linears) and all(linear.packed for linear in linears)

    def hidden(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        kv: KvCache,
        attend: CpuAttention,
        layout: Layout,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x [T, hidden], changed in place. Returns what the last layer gives, [T, hidden], or of `rows` alone."""
        work = _Work(x, angles, layout, self._shard, narrow=kv.layers[0][0].values.dtype != torch.float32)
        asked: _Rows = work
        for layer, pages in zip(self._layers, kv.layers, strict=True):
            asked = layer(work, *pages, attend, rows if layer is self._layers[-1] else None)
        return asked.x.add_(asked.more)


class _Rows:
    """Of some of a forward's rows, what follows attention in a layer, and goes on to the next."""

    def __init__(self, x: Tensor, attended: Array, shard: Shard) -> None:
        rows, heads, d = attended.shape
        self.x, self.x_array = x, cast(Array, x.numpy())  # [rows, hidden]
        self.more = torch.zeros_like(x)  # [rows, hidden], what x has still to be added to it
        self.more_array: Array = self.more.numpy()
        self.normed = _empty(*x.shape)  # [rows, hidden]
        self.attended_flat = attended.reshape(rows, heads * d)
        self.most = rows_of_task(rows)
        self.gate_up, self.gated = _empty(rows, 2 * shard.inner.size), _empty(rows, shard.inner.size)


class _Work(_Rows):
    """Of one forward: what a layer is given, and leaves to the next. Pages that are `narrow`, of another type than is
    computed in, are written once their numbers are known: these are kept here until then."""

    def __init__(self, x: Tensor, angles: tuple[Tensor, Tensor], layout: Layout, shard: Shard, narrow: bool) -> None:
        tokens, heads, kv_heads, d = len(x), shard.query_heads.size, shard.kv_heads.size, shard.head_dim
        self.q, self.attended = _empty(tokens, heads, d), _empty(tokens, heads, d)
        super().__init__(x, self.attended, shard)
        self._shard = shard
        self.layout, self.places = layout, np.arange(tokens) if narrow else layout.write_to.numpy()
        self.kept = [_empty(tokens, kv_heads, d) for _ in range(2)] if narrow else None
        self.cos, self.sin = (part.squeeze(1).numpy() for part in angles)
        self.qkv = _empty(tokens, (heads + 2 * kv_heads) * d)
        self.by_head = self.qkv.reshape(tokens, heads + 2 * kv_heads, d)

    def only(self, rows: Tensor) -> _Rows:
        """Once x has been added to: what still is to be added to it is not carried over."""
        return _Rows(self.x.index_select(0, rows), self.attended[rows.numpy()], self._shard)


def _empty(*shape: int) -> Array:
    """Of torch's memory, which is counted (`workers/worst_case.py`)."""
    array: Array = torch.empty(*shape).numpy()
    return array


class _CpuLayer:
    def __init__(self, layer: Layer, ranks: Ranks) -> None:
        self._ranks, self._eps = ranks, layer.eps
        self._input_norm, self._inner_norm = layer.input_norm.numpy(), layer.inner_norm.numpy()
        self._qk_norm: Array = (NOTHING if layer.qk_norm is None else layer.qk_norm).numpy()
        self._qkv, self._out = layer.qkv.arrays, layer.out.arrays
        self._inner = *layer.gate_up.arrays, *layer.down.arrays

    def __call__(self, work: _Work, keys: Pages, values: Pages, attend: CpuAttention, rows: Tensor | None) -> _Rows:
        """As of a `Layer`; what it was given, or of `rows` alone."""
        self._turn_and_keep(work, keys, values)
        if rows is not None and len(rows) == 0:
            return work.only(rows)
        attend.into(work.q, keys, values, work.layout, work.attended, rows)
        asked = work if rows is None else work.only(rows)
        self._from_attended(asked)
        return asked

    def _turn_and_keep(self, work: _Work, keys: Pages, values: Pages) -> None:
        of_page = -1, *keys.values.shape[2:]
        kept = work.kept or [pages.arrays[0].reshape(of_page) for pages in (keys, values)]
        given = work.x_array, work.more_array, self._input_norm, self._eps, work.normed
        turned = work.by_head, work.cos, work.sin, self._qk_norm, work.places, work.q
        as_many_threads_as_torch()
        before_attention(*given, *self._qkv, work.most, work.qkv, *turned, *kept)
        if work.kept is not None:
            for pages, rows in zip((keys, values), work.kept, strict=True):
                pages.write(work.layout.write_to, torch.from_numpy(rows))

    def _from_attended(self, rows: _Rows) -> None:
        projected = rows.attended_flat, *self._out, rows.most, rows.more_array
        given = rows.x_array, rows.more_array, self._inner_norm, self._eps, rows.normed
        inner = *self._inner, rows.most, rows.gate_up, rows.gated
        as_many_threads_as_torch()
        if self._ranks.size == 1:
            after_attention(*projected, *given, *inner)
            return
        project(*projected)
        self._ranks.sum(rows.more)
        feed_forward(*given, *inner)
        self._ranks.sum(rows.more)
