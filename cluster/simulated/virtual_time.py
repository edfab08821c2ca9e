"""An asyncio event loop whose time is made up: where nothing is left to do now, it is the next timer's moment at once.

Everything that sleeps, waits or is called later on it runs in the right order and takes no time. What waits for another
thread, a process or a socket would wait for ever: there is none of it in a simulation.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
TOGETHER_S = 1e-9
"""Timers that are less than this apart are run together."""


class NothingLeft(RuntimeError):
    """Everything waits for something that no timer will bring about."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` is seconds since the loop was made, and is a timer's own moment while its callback runs
    (or an earlier one less than a nanosecond before it, with which it is run).

    There is no outside world to look at and no other thread to hear, so that a turn of the loop is this file's own and
    short: a simulation takes a few of them for each iteration of each group.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._due: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle | asyncio.Future[Any], Any]] = []
        """Moments, each with a call that is due then, or with a future and its result."""
        self._made = itertools.count()  # timers of one moment are run in the order in which they were made

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._made), timer, None))
        return timer

    def resolve_at(self, when: float, future: asyncio.Future[T], result: T) -> None:
        """Set a future's result at a moment, unless it is done by then: what a timer does that is never cancelled."""
        heappush(self._timers, (when, next(self._made), future, result))

    def close(self) -> None:
        self._due.clear()
        self._timers.clear()
        super().close()

    def _run_once(self) -> None:
        """What `run_forever` does again and again until it is to stop: here once, as many turns as there are."""
        due, timers = self._due, self._timers
        while True:
            if not due and not self._stopping:  # type: ignore[attr-defined]
                self._jump()
            together = self._now + TOGETHER_S
            while timers and timers[0][0] < together:
                _, _, timer, result = heappop(timers)
                if isinstance(timer, asyncio.TimerHandle):
                    due.append(timer)
                elif not timer.done():
                    timer.set_result(result)
            for _ in range(len(due)):
                handle = due.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _jump(self) -> None:
        timers = self._timers
        while timers and _over(timers[0][2]):
            heappop(timers)
        if not timers:
            raise NothingLeft("every task of the simulation waits, and no timer is left")
        # By the timer's own number, not by what is left until then: sums of differences are off by a rounding error.
        self._now = max(self._now, timers[0][0])


def _over(timer: asyncio.TimerHandle | asyncio.Future[Any]) -> bool:
    """Whether nobody waits for it any more."""
    return timer.cancelled() if isinstance(timer, asyncio.TimerHandle) else timer.done()


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a virtual loop of its own, which it is given, and return what it returns.

    Raises NothingLeft where it waits for what cannot come. Must not be called from within a running event loop.
    """
    loop = VirtualLoop()
    with _no_search_for_cycles(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """What a run makes by the million is free as soon as nobody refers to it, and to look for cycles among all that is
    under way takes a tenth of its time. What is left of the run before, groups and loops that refer to each other, is
    collected first."""
    gc.collect(1)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
