"""The KV pages of one rank: for each layer keys and values of [blocks, block_size, kv heads of this rank, head_dim]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kv_dtype import SCALE_BYTES, coded, has_scales

_ONE = torch.ones(1)
_AS_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""numba has neither of these types on CPU: it gets their bits, by which it knows them apart."""


@dataclass(frozen=True)
class Pages:
    """The keys or the values of one layer. values [blocks, block_size, kv heads, head_dim]; where they are codes of one
    byte, each is worth itself times its token's and head's scale, scales [blocks, block_size, kv heads]."""

    values: Tensor
    scales: Tensor | None = None

    @cached_property
    def arrays(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """On CPU, values and scales as kernels take them; where there are no scales, ones that take no memory."""
        bits = _AS_BITS.get(self.values.dtype)
        scales = _ONE.expand(self.values.shape[:3]) if self.scales is None else self.scales
        return (self.values if bits is None else self.values.view(bits)).numpy(), scales.numpy()

    @property
    def block_size(self) -> int:
        return self.values.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.values.shape[2]

    def write(self, places: Tensor, rows: Tensor) -> None:
        """rows [tokens, kv heads, head_dim] to their places [tokens], block * block_size + offset."""
        if self.scales is None:
            self.values.flatten(0, 1).index_copy_(0, places, rows.to(self.values.dtype))
            return
        codes, scales = coded(rows, self.values.dtype)
        self.values.view(torch.uint8).flatten(0, 1).index_copy_(0, places, codes.view(torch.uint8))
        self.scales.flatten(0, 1).index_copy_(0, places, scales)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """[*blocks.shape, block_size, kv heads, head_dim] in the type that is computed in. `blocks` are int64."""
        if self.scales is None:
            return _taken(self.values, blocks).to(dtype)
        codes = _taken(self.values.view(torch.uint8), blocks).view(self.values.dtype)
        return (codes.float() * _taken(self.scales, blocks).unsqueeze(-1)).to(dtype)


def _taken(pages: Tensor, blocks: Tensor) -> Tensor:
    """[*blocks.shape, ...] of pages [blocks, ...]."""
    return pages.index_select(0, blocks.flatten()).view(*blocks.shape, *pages.shape[1:])


class KvCache:
    """`layers`: keys and values of each. `planes`: the same memory, [layers, 2, blocks, ...] each, for those who move
    whole blocks and need not know what they hold."""

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
        shape = (layers, 2, blocks, block_size, kv_heads)
        try:
            values = torch.zeros((*shape, head_dim), dtype=dtype, device=device)
            scales = torch.zeros(shape, dtype=torch.float32, device=device) if has_scales(dtype) else None
        except (RuntimeError, MemoryError) as error:
            need = blocks * bytes_per_block(layers, block_size, kv_heads, head_dim, dtype)
            reason = str(error).splitlines()[0]
            raise ValueError(f"{need / 2**30:.2f} GiB for KV cannot be had ({reason}); lower --kv-memory") from None
        self.layers: list[tuple[Pages, Pages]] = [
            (Pages(*keys), Pages(*of_values)) for keys, of_values in _by_layer(values, scales)
        ]
        self.planes: tuple[Tensor, ...] = (values,) if scales is None else (values.view(torch.uint8), scales)


def _by_layer(values: Tensor, scales: Tensor | None) -> Iterator[Iterator[tuple[Tensor, Tensor | None]]]:
    """For each layer, of keys and of values: a view of what they hold and one of their scales."""
    nothing: tuple[None, None] = (None, None)
    for index, of_layer in enumerate(values.unbind(0)):
        yield zip(of_layer.unbind(0), nothing if scales is None else scales.unbind(0)[index].unbind(0), strict=True)


def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    a_head = head_dim * dtype.itemsize + (SCALE_BYTES if has_scales(dtype) else 0)
    return 2 * layers * block_size * kv_heads * a_head
