"""What stands in place of the workers: an executor that takes as long as a cost model says, and makes tokens up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache

from cluster.loop import IterationRecord
from cluster.simulated.virtual_time import VirtualLoop
from scheduler.plan import IterationPlan, IterationResult
from scheduler.progress import InFlight

MADE_UP = 0
"""The token that every simulated sequence gets, time after time."""

UnderWay = Callable[[int], InFlight]
"""What a scheduler knows of an iteration that it has planned (`Scheduler.under_way`)."""
Duration = Callable[[InFlight], float]
"""Seconds that an iteration takes."""


class SimulatedExecutor:
    """One group of workers that run a plan after the other, in virtual time."""

    __slots__ = ("_duration", "_free_at", "_loop", "_under_way")

    def __init__(self, under_way: UnderWay, duration: Duration, loop: VirtualLoop) -> None:
        self._loop = loop
        self._under_way = under_way
        self._duration = duration
        self._free_at = 0.0

    def execute(self, plan: IterationPlan) -> asyncio.Future[IterationResult]:
        known = self._under_way(plan.iteration)
        # From the start of the one before: a plan that was sent while that one ran waits for it.
        starts = max(self._free_at, self._loop.time())
        self._free_at = starts + self._duration(known)
        answer: asyncio.Future[IterationResult] = self._loop.create_future()
        result = IterationResult(plan.iteration, _made_up(len(known.sampling)))
        self._loop.resolve_at(self._free_at, answer, result)
        return answer

    async def close(self) -> None:
        pass


class RecordedExecutor:
    """Answers as real workers did, at the moments at which they did. `at` is told each moment as it comes."""

    def __init__(self, records: Sequence[IterationRecord], at: Callable[[float], None]) -> None:
        self._records = {record.plan.iteration: record for record in records}
        self._at = at

    async def execute(self, plan: IterationPlan) -> IterationResult:
        """Raises KeyError for an iteration that was not recorded."""
        record = self._records[plan.iteration]
        await until(record.ended)
        self._at(record.ended)
        return record.result

    async def close(self) -> None:
        pass


@lru_cache(maxsize=4096)
def _made_up(tokens: int) -> tuple[int, ...]:
    """The same tuple for all iterations with so many."""
    return (MADE_UP,) * tokens


async def until(moment: float) -> None:
    """Return at a moment of the running loop's time, exactly; at once where it is past."""
    loop = asyncio.get_running_loop()
    if moment <= loop.time():
        return
    came: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(moment, _come, came)
    try:
        await came
    finally:
        timer.cancel()


def _come(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
