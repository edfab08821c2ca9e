"""Tensor parallelism: how a dimension is divided among ranks, and the three collectives that put it together again.

gloo on CPU, NCCL on CUDA: the same calls. On CPU ranks of one host take memory that they share instead. With one rank
every collective is the identity and nothing is initialised.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parts import Part, split
from workers.shared_exchange import PLACE, SharedExchange
from workers.stores import listening_store, store_at

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This rank among its worker group."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu", rendezvous: str | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}")
        self.rank, self.size = rank, size
        self.backend = "none" if size == 1 else ("nccl" if device.startswith("cuda") else "gloo")
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            if rendezvous is None:
                raise ValueError("several ranks need a rendezvous address, such as tcp://127.0.0.1:29500")
            if self.backend == "gloo" and urlsplit(rendezvous).hostname in ("127.0.0.1", "localhost", "::1"):
                # Ranks of one host: gloo would else look its own host name up, which not every machine can.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            dist.init_process_group(
                self.backend, store=_met_at(rendezvous, rank, size), rank=rank, world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
            )  # fmt: skip
            self._group = dist.group.WORLD
        self.shared: SharedExchange | None = None
        """Taken instead of the group where it can be."""
        if self.backend == "gloo" and self._group is not None:
            self.shared = SharedExchange.open(rank, size, COLLECTIVE_TIMEOUT.total_seconds(), self._group)

    @property
    def collectives(self) -> str:
        return "shared memory" if self.shared is not None else self.backend

    def part(self, count: int) -> Part:
        """This rank's part of a dimension."""
        return split(count, self.size)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.shared is not None and self.shared.takes(x):
            self.shared.sum(x)
        elif self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """[rows, this rank's part of `total`] of every rank, side by side: [rows, total]. Parts may be uneven."""
        if self.size == 1:
            return x
        x, parts = x.contiguous(), split(total, self.size)
        widest = parts[0].size
        if self.shared is not None and self.shared.takes(x) and widest <= PLACE:
            return self.shared.gather_columns(x, parts)
        padded = x.new_zeros(x.shape[0], widest)
        padded[:, : x.shape[1]] = x
        pieces = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(pieces, padded, group=self._group)
        return torch.cat([piece[:, : part.size] for piece, part in zip(pieces, parts, strict=True)], dim=1)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _met_at(rendezvous: str, rank: int, size: int) -> Any:
    """The store of a group: the first rank has it. Raises ValueError for what is no tcp://host:port."""
    url = urlsplit(rendezvous)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ValueError(f"a rendezvous is an address such as tcp://127.0.0.1:29500, not {rendezvous!r}")
    meet = listening_store if rank == 0 else store_at
    return meet(url.hostname, url.port, COLLECTIVE_TIMEOUT, size)
