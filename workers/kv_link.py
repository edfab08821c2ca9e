"""A link between a rank that sends KV and one that takes it: two processes, a process group of their own.

Headers and answers are small tensors over gloo, so that nothing waits on a GPU for who may not come; the content goes
over NCCL where both ranks have CUDA devices, else over gloo as well. No other collective of either rank is touched: a
link is made, broken and made again without the worker groups of its two ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from workers.kv_orders import LinkConfig
from workers.stores import listening_store, store_at

dist: Any = torch.distributed  # whose stores and process groups have no types
TIMEOUT = timedelta(seconds=60)
"""For a message that has begun. A peer that died is noticed at once: its connection is closed."""
IDLE = timedelta(days=365)
HEADER_WORDS = 6
SENDER, TAKER = 0, 1


class LinkError(Exception):
    """The other side is gone, hangs, or speaks otherwise than agreed."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message holds: `count` blocks for the places `first` .. of those that were opened under `lease`."""

    number: int
    lease: int
    first: int
    count: int
    bytes: int

    def tensor(self) -> Tensor:
        words = [self.number, self.lease, self.first, self.count, self.bytes, 0]
        return torch.tensor(words, dtype=torch.int64)


class Link:
    """One side, connected. Every method blocks, and raises LinkError."""

    def __init__(self, config: LinkConfig, store: Any, rank: int) -> None:
        self.config = config
        self._peer = 1 - rank
        try:
            self._control: Any = _gloo(store, rank, config.own_address)
            self._payload: Any = self._control if config.payload == "gloo" else _OnStream(_nccl(store, rank))
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"link {config.name} cannot be made: {_line(error)}") from None

    @classmethod
    def to_taker(cls, config: LinkConfig, port: int) -> Link:
        """From the sending rank, to where the taking one listens."""
        try:
            store = store_at(config.address, port, TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"link {config.name}: nobody listens: {_line(error)}") from None
        return cls(config, store, SENDER)

    def send(self, header: Header, content: Tensor) -> bool:
        """A message, content [bytes] of uint8. Whether the other side took it: it refuses what is for a stale lease."""
        answer = torch.zeros(1, dtype=torch.int64)
        try:
            self._control.send([header.tensor()], self._peer, 0).wait(TIMEOUT)
            self._payload.send([content], self._peer, 0).wait(TIMEOUT)
            self._control.recv([answer], self._peer, 0).wait(TIMEOUT)
        except RuntimeError as error:
            raise LinkError(f"link {self.config.name}: {_line(error)}") from None
        return bool(answer.item())

    def next_header(self) -> Header:
        """Waits for as long as it takes."""
        words = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        self._recv(self._control, words, IDLE)
        return Header(*(int(word) for word in words[:5]))

    def content(self, count: int, device: torch.device) -> Tensor:
        """That follows a header: [count] of uint8."""
        over_gloo = self._payload is self._control
        content = torch.empty(count, dtype=torch.uint8, device="cpu" if over_gloo else device)
        self._recv(self._payload, content, TIMEOUT)
        return content

    def answer(self, taken: bool) -> None:
        try:
            self._control.send([torch.tensor([int(taken)], dtype=torch.int64)], self._peer, 0).wait(TIMEOUT)
        except RuntimeError as error:
            raise LinkError(f"link {self.config.name}: {_line(error)}") from None

    def _recv(self, group: Any, into: Tensor, timeout: timedelta) -> None:
        try:
            group.recv([into], self._peer, 0).wait(timeout)
        except RuntimeError as error:
            raise LinkError(f"link {self.config.name}: {_line(error)}") from None


class _OnStream:
    """NCCL on a stream of its own: on the default one its operations would wait for the forward, and that for them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _OnStream:
        with torch.cuda.stream(self._stream):
            self._group.send(tensors, peer, tag).wait()
        return self

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _OnStream:
        with torch.cuda.stream(self._stream):
            self._group.recv(tensors, peer, tag).wait()
        return self

    def wait(self, timeout: timedelta) -> None:
        """Until the content has gone, or has come."""
        self._stream.synchronize()


def listen(address: str) -> tuple[Any, int]:
    """Where a sending rank finds this one: a store on a free port of its own."""
    store = listening_store(address, 0, TIMEOUT)
    return store, int(store.port)


def _gloo(store: Any, rank: int, own_address: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout = TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(dist.PrefixStore("control", store), rank, 2, options)


def _nccl(store: Any, rank: int) -> Any:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise ValueError("this build of torch has no NCCL")
    return kind(dist.PrefixStore("payload", store), rank, 2)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
