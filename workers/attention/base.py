"""What every attention backend gets: the flat batch's layout over paged KV. The same numbers on CPU and on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kv_cache import Pages


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each of a forward's segments is, in the flat tokens and in the pages. All int32 but `write_to` (int64).

    cu_seqlens_q [n + 1]: segment i's queries are rows cu_seqlens_q[i] : cu_seqlens_q[i + 1]. block_table [n, most
    blocks]: its pages. seqused_k [n]: KV positions it attends to, its own queries' included: causality is aligned to
    their end. cu_seqlens_k [n + 1]: the running sum of seqused_k. write_to [tokens]: each token's place,
    block * block_size + offset. On the host: counts, used and table, of seqused_k and block_table.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    block_table: Tensor
    seqused_k: Tensor
    write_to: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    counts: NDArray[np.int32]
    used: NDArray[np.int32]
    table: NDArray[np.int32]


def make_layout(
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    tables: NDArray[np.int32],
    block_size: int,
    device: torch.device,
) -> Layout:
    """From each segment's first position, token count and block table ([n, width], only the used entries matter)."""
    used = starts + counts
    most_blocks = -(-int(used.max()) // block_size)
    table = np.ascontiguousarray(tables[:, :most_blocks])
    cu_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    cu_k = np.concatenate(([0], np.cumsum(used))).astype(np.int32)
    segment = np.repeat(np.arange(len(counts)), counts)
    positions = token_positions(starts, counts)
    write_to = table[segment, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def move(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Layout(
        cu_seqlens_q=move(cu_q),
        cu_seqlens_k=move(cu_k),
        block_table=move(table),
        seqused_k=move(used.astype(np.int32)),
        write_to=move(write_to),
        max_seqlen_q=int(counts.max()),
        max_seqlen_k=int(used.max()),
        counts=counts,
        used=used,
        table=table,
    )


def token_positions(starts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Position of every flat token: starts[i] .. starts[i] + counts[i] - 1 of each segment in turn."""
    first_row = np.cumsum(counts) - counts
    positions: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - first_row, counts)
    return positions


class Attention(Protocol):
    """Causal attention of a flat batch over paged KV.

    q [tokens, query heads, head_dim]; k_pages and v_pages [blocks, block_size, kv heads, head_dim], into which this
    forward's keys and values have been written: they too are read as pages hold them, so that all who read them read
    the same. Returns [tokens, query heads, head_dim].
    """

    @property
    def name(self) -> str: ...

    @property
    def reads_as_stored(self) -> bool:
        """Whether pages are read in place, without a wider copy of them."""

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor: ...
