"""How far a run is, for whoever watches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.bench.record import Outcome
from deploy.bench.sending import Sending

EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` is `detect`, `warm-up`, `prepare` or `run`; the numbers are those of the run's requests."""

    stage: str
    planned: int = 0
    sent: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


Watcher = Callable[[Progress], None]


@dataclass(slots=True)
class Tally:
    """Counts as requests start and end, so that looking at a run costs no more when it is a long one."""

    planned: int
    origin: float
    _running: list[Sending] = field(default_factory=list)
    _sent: int = 0
    _finished: int = 0
    _failed: int = 0
    _tokens: int = 0

    def started(self, sending: Sending) -> None:
        self._sent += 1
        self._running.append(sending)

    def progress(self) -> Progress:
        self._settle()
        return Progress(
            stage="run",
            planned=self.planned,
            sent=self._sent,
            running=len(self._running),
            finished=self._finished,
            failed=self._failed,
            tokens=self._tokens + sum(len(sending.clock.times) for sending in self._running),
            elapsed_s=max(0.0, time.perf_counter() - self.origin),
        )

    def _settle(self) -> None:
        """Count those that have ended since the last look, and let go of them."""
        for sending in self._running:
            if sending.record is not None:
                self._finished += sending.record.outcome is Outcome.FINISHED
                self._failed += sending.record.outcome is Outcome.FAILED
                self._tokens += len(sending.clock.times)
        self._running = [sending for sending in self._running if sending.record is None]


async def watch(watcher: Watcher, tally: Tally) -> None:
    """Tell it now and then until cancelled."""
    while True:
        watcher(tally.progress())
        await asyncio.sleep(EVERY_S)
