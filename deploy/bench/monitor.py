"""How far a run is, for whoever watches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.bench.record import Outcome
from deploy.bench.sending import Sending

EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` is `detect`, `prepare`, `warm-up` or `run`; the numbers are those of the run's requests."""

    stage: str
    planned: int = 0
    sent: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


Watcher = Callable[[Progress], None]


def snapshot(sendings: Sequence[Sending], planned: int, origin: float) -> Progress:
    sent = [sending for sending in sendings if sending.sent is not None]
    outcomes = [sending.record.outcome for sending in sent if sending.record is not None]
    return Progress(
        stage="run",
        planned=planned,
        sent=len(sent),
        running=len(sent) - len(outcomes),
        finished=outcomes.count(Outcome.FINISHED),
        failed=outcomes.count(Outcome.FAILED),
        tokens=sum(len(sending.clock.times) for sending in sent),
        elapsed_s=max(0.0, time.perf_counter() - origin),
    )


async def watch(watcher: Watcher, sendings: Sequence[Sending], planned: int, origin: float) -> None:
    """Tell it now and then until cancelled."""
    while True:
        watcher(snapshot(sendings, planned, origin))
        await asyncio.sleep(EVERY_S)
