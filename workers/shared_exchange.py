"""What ranks of one host tell each other, through memory that they share instead of sockets.

Each rank has a place in either of two halves, which turns take alternately. In a turn a rank writes its numbers, says
so by a counter, and waits until all have said so. Nobody writes into a half before everybody has read what was there
two turns ago: whoever is in a turn has seen all others in the one before, and so past reading the one before that.

The memory has no name: it belongs to a descriptor of rank 0, which the others reach through /proc, so that it is gone
with the last of them, however they end.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from typing import Any

import numba
import numpy as np
import psutil
import torch
import torch.distributed as dist
from llvmlite import ir
from numba.core import types as _types
from numba.extending import intrinsic
from torch import Tensor

from workers.parts import Part

types: Any = _types

PLACE = 1 << 20
"""Numbers that fit a rank's place; more go in several turns."""
SPINS = 2_000
"""Looks at a counter, the processor given to whoever wants it after each TRIES of them, before sleeping in between."""
TRIES = 20
NAP_S = 0.0002
LOOK_AFTER_S = 0.1
"""Of waiting in vain: whether the others are still alive."""

_LINE = 64
_NONCE_BYTES = 16
_FLOAT = 4


class PeerGone(RuntimeError):
    """Another rank's process has ended, or has not come for as long as a collective may take."""


class SharedExchange:
    """`size` ranks; each of their turns is taken by all of them."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._counters = np.frombuffer(memory, np.int64, size * _LINE // 8, _LINE)
        self._pids = np.frombuffer(memory, np.int64, size, _LINE * (1 + size))
        self._pids[rank] = os.getpid()
        numbers = torch.frombuffer(memory, dtype=torch.float32, offset=_header(size), count=2 * size * PLACE)
        self._places = numbers.view(2, size, PLACE)
        self._turn = 0

    @classmethod
    def open(cls, rank: int, size: int, timeout_s: float, group: dist.ProcessGroup) -> SharedExchange | None:
        """None where some rank cannot reach the memory: it is on another host. Called by all ranks of the group."""
        said = torch.zeros(3 + _NONCE_BYTES, dtype=torch.int64)
        descriptor, nonce = -1, secrets.token_bytes(_NONCE_BYTES)
        if rank == 0 and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("stallfree-ranks")
            os.ftruncate(descriptor, _bytes(size))
            os.pwrite(descriptor, nonce, 0)
            said = torch.tensor([1, os.getpid(), descriptor, *nonce])
        dist.broadcast(said, 0, group=group)
        there, pid, number, *expected = said.tolist()
        memory = _reach(f"/proc/{pid}/fd/{number}", bytes(expected), size) if there else None
        exchange = cls(rank, size, memory, timeout_s) if memory is not None else None
        together = torch.tensor([int(exchange is not None)])
        dist.all_reduce(together, dist.ReduceOp.MIN, group=group)
        if descriptor >= 0:
            os.close(descriptor)
        return exchange if together.item() else None

    @staticmethod
    def takes(x: Tensor) -> bool:
        return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()

    def sum(self, x: Tensor) -> None:
        """Of all ranks' x, in place, added in the order of the ranks. Raises PeerGone."""
        flat = x.view(-1)
        for start in range(0, flat.numel(), PLACE):
            piece = flat[start : start + PLACE]
            first, second, *others = self._exchange(piece)[:, : piece.numel()]
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)

    def gather_columns(self, x: Tensor, parts: list[Part]) -> Tensor:
        """x [rows, this rank's part] of every rank, side by side; a row of each fits its place. Raises PeerGone."""
        out = x.new_empty(len(x), parts[-1].stop)
        at_once = PLACE // max(part.size for part in parts)
        for rows, into in zip(torch.split(x, at_once), torch.split(out, at_once), strict=True):
            for place, part in zip(self._exchange(rows.reshape(-1)), parts, strict=True):
                into[:, part.start : part.stop] = place[: len(rows) * part.size].view(len(rows), part.size)
        return out

    def _exchange(self, numbers: Tensor) -> Tensor:
        """[ranks, PLACE], every rank's place beginning with its numbers, to be read before the turn after the next."""
        half = self._places[self._turn % 2]
        half[self._rank, : numbers.numel()] = numbers
        self._turn += 1
        if not _arrive(self._counters, self._rank, self._turn, self._size):
            self._wait()
        return half

    def _wait(self) -> None:
        began = looked = time.monotonic()
        while not _all_there(self._counters, self._turn, self._size):
            time.sleep(NAP_S)
            now = time.monotonic()
            if now - looked > LOOK_AFTER_S:
                looked = now
                self._check(now - began)

    def _check(self, waited_s: float) -> None:
        missing = [r for r in range(self._size) if self._counters[r * _LINE // 8] < self._turn]
        for rank in missing:
            if not _alive(int(self._pids[rank])):
                raise PeerGone(f"rank {rank} is gone")
        if waited_s > self._timeout_s:
            raise PeerGone(f"rank {missing[0]} has not come for {waited_s:.0f} s")


def _header(size: int) -> int:
    """Bytes before the places: a nonce, a counter for each rank, and who they are, on lines of their own."""
    return _LINE * (2 + size + size // 8)


def _bytes(size: int) -> int:
    return _header(size) + 2 * size * PLACE * _FLOAT


def _reach(path: str, nonce: bytes, size: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != _bytes(size) or os.pread(descriptor, len(nonce), 0) != nonce:
            return None
        return mmap.mmap(descriptor, _bytes(size))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _load(typing: Any, counters: Any, index: Any) -> Any:
    """counters[index], and whatever its writer had written before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return types.int64(counters, types.intp), build


def _store(typing: Any, counters: Any, index: Any, value: Any) -> Any:
    """counters[index] = value, after whatever was written before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        builder.store_atomic(arguments[2], builder.gep(array.data, [arguments[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), build


def _rest(typing: Any) -> Any:
    """Take a moment's rest, so that of two threads of one core the one that is waited for has its units. Without, a
    step of two ranks on two such threads took half as long again."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), nothing), [])
        return context.get_dummy_value()

    return types.void(), build


_load_counter: Any = intrinsic(_load)
_store_counter: Any = intrinsic(_store)
_rest_a_moment: Any = intrinsic(_rest)
_give_way: Any = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(cache=True)
def _all_there(counters: Any, turn: Any, size: Any) -> Any:
    there = True
    for rank in range(size):
        there &= _load_counter(counters, rank * 8) >= turn
    return there


@numba.njit(cache=True, nogil=True)
def _arrive(counters: Any, rank: Any, turn: Any, size: Any) -> Any:
    """Whether all others came before patience ended."""
    _store_counter(counters, rank * 8, turn)
    for look in range(SPINS):
        if _all_there(counters, turn, size):
            return True
        _rest_a_moment()
        if look % TRIES == TRIES - 1:
            _give_way()
    return False
