"""A recorded run of the live engine, run again: same arrivals, same iteration times, same answers, no workers.

What is left to the scheduler is what it decides, so that its plans must come out the same. That is the check that a
simulation is the server's own code, and a way to look at a run again with a debugger.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from cluster.loop import IterationLoop, IterationRecord
from cluster.simulated.executor import RecordedExecutor, until
from cluster.simulated.virtual_time import VirtualLoop, run_virtual
from cluster.tuning import Tuning
from scheduler.progress import Served
from scheduler.request import Delta, Request
from scheduler.scheduler import Scheduler


@dataclass
class Recording:
    """An observer of the live engine. Arrivals are taken from the requests' first chunks, by the engine's clock."""

    records: list[IterationRecord] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)

    def __call__(self, record: IterationRecord) -> None:
        self.records.append(record)
        for chunk in record.under_way.chunks:
            self.arrivals.setdefault(chunk.request_id, chunk.arrival)


def replay(
    scheduler: Scheduler, requests: Sequence[Request], recording: Recording, tuning: Tuning | None = None
) -> list[IterationRecord]:
    """What the scheduler (new, and made like the live one) makes of a recorded run of these requests.

    The recording must be whole, from the engine's first iteration until all requests had ended by themselves, with one
    plan under way at a time. Raises KeyError where a request never ran, or an iteration comes that was not recorded.
    """
    return run_virtual(lambda loop: _Replay(loop, scheduler, recording, tuning).run(requests))


class _Replay:
    """The clock that the scheduler sees is set to what the live one saw at the same step: a request added, a plan made,
    a result committed. The virtual loop brings the steps in their order."""

    def __init__(self, loop: VirtualLoop, scheduler: Scheduler, recording: Recording, tuning: Tuning | None) -> None:
        self._recording = recording
        self._tuning = tuning
        self._now = 0.0
        self._left: set[str] = set()
        self._ended = asyncio.Event()
        self._replayed: list[IterationRecord] = []
        self._virtual = loop
        self._loop = IterationLoop(
            scheduler,
            RecordedExecutor(recording.records, at=self._set_clock),
            clock=lambda: self._now,
            publish=None,
            observer=self,
        )

    async def run(self, requests: Sequence[Request]) -> list[IterationRecord]:
        self._left = {request.request_id for request in requests}
        running = asyncio.create_task(self._loop.run())
        await self._add_all(sorted(requests, key=lambda request: self._recording.arrivals[request.request_id]))
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self._loop.close()
        await running
        if self._loop.failure is not None:
            raise KeyError(self._loop.failure)
        return self._replayed

    async def _add_all(self, requests: Sequence[Request]) -> None:
        """Those that were added before the same plan are added together: nothing was decided between them."""
        arrivals, starts = self._recording.arrivals, [record.started for record in self._recording.records]
        for plan, together in groupby(requests, lambda request: bisect_left(starts, arrivals[request.request_id])):
            batch = list(together)
            await until(arrivals[batch[0].request_id])
            for request in batch:
                self._set_clock(arrivals[request.request_id])
                self._loop.add(request)
            self._set_clock(starts[plan])

    def iteration(self, record: IterationRecord) -> None:
        self._replayed.append(record)
        self.ends(record.deltas, record.served)
        if self._tuning is not None:
            self._tuning.observe(record)
        if len(self._replayed) < len(self._recording.records):
            self._set_clock(self._recording.records[len(self._replayed)].started)

    def _set_clock(self, moment: float) -> None:
        self._now = moment

    def afterwards(self, record: IterationRecord) -> None:
        """Nobody waits."""

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        self._left.difference_update(delta.request_id for delta in deltas if delta.finish is not None)
        if not self._left:
            self._ended.set()
