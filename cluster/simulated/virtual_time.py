"""An asyncio event loop whose time is made up: where nothing is left to do now, it is the next timer's moment at once.

Everything that sleeps, waits or is called later on it runs in the right order and takes no time. What waits for another
thread, a process or a socket would wait for ever: there is none of it in a simulation.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Everything waits for something that no timer will bring about."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is seconds since the loop was made, and is a timer's own moment while its callback runs
    (or an earlier one less than a nanosecond before it, with which it is run)."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self) -> None:
        # By the timer's own number, not by what is left until then: sums of differences are off by a rounding error.
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not scheduled:
            raise NothingLeft("every task of the simulation waits, and no timer is left")
        self._now = max(self._now, scheduled[0].when())


class _Jump(selectors.BaseSelector):
    """Where an event loop would wait for the outside world, it lets time pass instead."""

    def __init__(self, jump: Callable[[], None]) -> None:
        self._jump = jump
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._jump()
        return []

    # The loop registers its own wake-up pipe, which nobody writes to.

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a virtual loop of its own, which it is given, and return what it returns.

    Raises NothingLeft where it waits for what cannot come. Must not be called from within a running event loop.
    """
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
