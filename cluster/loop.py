"""The iteration loop of one worker group: schedule, execute, commit, publish. Clock and executor are injected."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.engine import EngineUnavailable
from cluster.executor import Executor
from scheduler.plan import IterationPlan, IterationResult
from scheduler.progress import InFlight, Served, TokenTiming
from scheduler.request import Delta, Finish, Request
from scheduler.roofline import Features
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.slo import UNPROMISED

_log = logging.getLogger(__name__)

PROBE_PREFIX = "_probe-"
"""Requests of the health check have ids that begin so; nobody is subscribed to them and no figure counts them."""

AUDIT_EVERY_S = 10.0
"""Looking at every block takes milliseconds where there are many, which who comes next would wait for."""

Publish = Callable[[list[Delta]], None]
Predict = Callable[[tuple[Features, ...]], float]
"""Seconds that an iteration of these forwards will take."""


class Observer(Protocol):
    """Whoever watches a loop. Called on its event loop, between iterations: it has to be quick, and must not raise."""

    def iteration(self, record: IterationRecord) -> None: ...

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        """What ended outside of any iteration: aborted, stopped by its reader, outgrown the pool, failed."""


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One iteration as it happened. Times are seconds of the loop's clock: plan made, result committed.

    One that was sent while another ran starts when that one ends. `under_way` is what the scheduler knew of it,
    `predicted_s` what it was expected to take when it was sent (None where nobody can tell), and `served` the requests
    that it ended as they should.
    """

    plan: IterationPlan
    result: IterationResult
    under_way: InFlight
    predicted_s: float | None
    started: float
    ended: float
    deltas: list[Delta]
    timings: list[TokenTiming]
    served: list[Served]

    @property
    def features(self) -> tuple[Features, ...]:
        """Of each of its forwards."""
        return self.under_way.features

    @property
    def actual_s(self) -> float:
        return self.ended - self.started

    @property
    def prefill_tokens(self) -> int:
        return sum(forward.prefill_tokens for forward in self.features)

    @property
    def decodes(self) -> int:
        return sum(forward.decodes for forward in self.features)


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: IterationPlan
    under_way: InFlight
    predicted_s: float | None
    started: float
    answer: asyncio.Task[IterationResult]


class IterationLoop:
    """Runs until it is closed or its executor fails, which ends every request with the reason.

    `overlap` plans are under way at once: 2 hides scheduling behind the forward, at the cost of at most one discarded
    token for a sequence that turns out to be finished. `publish` gets the deltas of an iteration in one call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float],
        publish: Publish,
        observer: Observer | None = None,
        predict: Predict | None = None,
        overlap: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._publish = publish
        self._observer = observer
        self._predict = predict
        self._overlap = overlap
        self._under_way: deque[_Launched] = deque()
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._last_ended = -math.inf
        self._closed = False
        self._probes = 0
        self._next_audit = -math.inf
        self._audit_failed = False
        self.failure: str | None = None
        self.iterations = 0

    # What others ask of it, from the same event loop.

    def add(self, request: Request) -> None:
        """Raises RequestRefused, or EngineUnavailable once the workers have failed."""
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        self.scheduler.add(request, self._clock())
        self._wake.set()

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        """`finish` STOP: its reader has had all it asked for."""
        if self.scheduler.abort(request_id, finish):
            self._wake.set()

    def wake(self) -> None:
        """Its scheduler has something new to run, or to tell."""
        self._wake.set()

    def end_requests(self, reason: str) -> None:
        """End every request with an error, at once."""
        self.scheduler.fail_all(reason)
        self._wake.set()

    async def heartbeat(self) -> None:
        """Return once an iteration was completed after this call: one under way, or a probe's if there is none.

        Raises EngineUnavailable where the workers have failed. It takes what it takes: deadlines are the caller's.
        """
        seen = self.iterations
        while self.iterations == seen and self.failure is None:
            if self.scheduler.idle:
                self._probes += 1
                probe = Request(
                    f"{PROBE_PREFIX}{self._probes}", (0,), 1, SamplingParams(temperature=0.0), promise=UNPROMISED
                )
                self.add(probe)
            await self._progress.wait()
        if self.failure is not None:
            raise EngineUnavailable(self.failure)

    async def run(self) -> None:
        """The loop itself. Returns after `close`, or after the executor's failure (see `failure`)."""
        try:
            while not self._closed:
                self._launch()
                self._tell_ends()
                if self._under_way:
                    await self._complete()
                else:
                    self._audit()
                    self._tell_progress()
                    await self._wake.wait()
                self._wake.clear()
        except Exception as error:
            self._fail(f"the workers failed: {type(error).__name__}: {error}")
        finally:
            for launched in self._under_way:
                launched.answer.cancel()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # Its steps.

    def _launch(self) -> None:
        while len(self._under_way) < self._overlap:
            started = self._clock()
            plan = self.scheduler.schedule(started)
            if plan is None:
                return
            under_way = self.scheduler.under_way(plan.iteration)
            predicted = None if self._predict is None else self._predict(under_way.features)
            answer = asyncio.ensure_future(self._executor.execute(plan))
            self._under_way.append(_Launched(plan, under_way, predicted, started, answer))

    async def _complete(self) -> None:
        launched = self._under_way[0]
        result = await launched.answer
        self._under_way.popleft()
        ended = self._clock()
        deltas = self.scheduler.commit(result, ended)
        self.iterations += 1
        self._publish_if_any(deltas)
        timings, served = self.scheduler.take_timings(), self.scheduler.take_served()
        if self._observer is not None:
            self._observer.iteration(
                IterationRecord(
                    plan=launched.plan,
                    result=result,
                    under_way=launched.under_way,
                    predicted_s=launched.predicted_s,
                    started=max(launched.started, self._last_ended),
                    ended=ended,
                    deltas=deltas,
                    timings=timings,
                    served=served,
                )
            )
        self._last_ended = ended
        self._tell_progress()

    def _audit(self) -> None:
        """Between requests, now and then, whether slots and blocks add up: it is logged once, and then only counted."""
        now = self._clock()
        if not self.scheduler.idle or now < self._next_audit:
            return
        self._next_audit = now + AUDIT_EVERY_S
        broken = self.scheduler.audit()
        if broken is not None and not self._audit_failed:
            self._audit_failed = True
            _log.error("slots or KV blocks do not add up, which is a bug: %s", broken)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.scheduler.fail_all(reason)
        self._tell_ends()
        self._tell_progress()

    def _tell_ends(self) -> None:
        deltas, served = self.scheduler.take_deltas(), self.scheduler.take_served()
        self._publish_if_any(deltas)
        if self._observer is not None and (deltas or served):
            self._observer.ends(deltas, served)

    def _publish_if_any(self, deltas: list[Delta]) -> None:
        wanted = [delta for delta in deltas if not delta.request_id.startswith(PROBE_PREFIX)]
        if wanted:
            self._publish(wanted)

    def _tell_progress(self) -> None:
        """Wake everybody who waits for something to happen; each event serves once."""
        self._progress.set()
        self._progress = asyncio.Event()
