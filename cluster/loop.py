"""The iteration loop of one worker group: schedule, execute, commit, publish. Clock and executor are injected."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cluster.engine import EngineUnavailable
from cluster.executor import Executor
from cluster.iteration_record import IterationRecord, Observer
from cluster.recovery import Recovery, WorkersLost, hear, in_words
from scheduler.plan import IterationPlan, IterationResult
from scheduler.progress import InFlight
from scheduler.request import Delta, Finish, Request
from scheduler.roofline import Features
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.slo import UNPROMISED

__all__ = ["PROBE_PREFIX", "IterationLoop", "IterationRecord", "Observer", "Predict", "Publish"]

_log = logging.getLogger(__name__)

PROBE_PREFIX = "_probe-"
"""Requests of the health check have ids that begin so; nobody is subscribed to them and no figure counts them."""

GRACE_S = 1.0
"""For an answer that came while this process itself was held up, so that the time was over before it was looked at."""

AUDIT_EVERY_S = 10.0
"""Looking at every block takes milliseconds where there are many, which who comes next would wait for."""

Publish = Callable[[list[Delta]], None]
Predict = Callable[[tuple[Features, ...]], float]
"""Seconds that an iteration of these forwards will take."""


SENDING_TURNS = 2
"""Turns of the event loop until a plan that was handed to an executor is written: one of its own, one of its
transport."""


class _Launched(NamedTuple):
    plan: IterationPlan
    under_way: InFlight
    predicted_s: float | None
    started: float
    answer: asyncio.Future[IterationResult]


class _Completed(NamedTuple):
    """Of an iteration, what is still to be told."""

    deltas: list[Delta]
    record: IterationRecord | None


class IterationLoop:
    """Runs until it is closed. Where its executor fails, `recovery` gives it another, and every request starts over
    from the tokens it has; without one, or once that gives up, every request is ended with the reason.

    `overlap` plans are under way at once: 2 hides scheduling behind the forward, at the cost of at most one discarded
    token for a sequence that turns out to be finished. `publish` gets the deltas of an iteration in one call;
    None: nobody reads tokens, so that most are not told to the observer either, but for their timings. `send_first`:
    deltas are published once the next plan is on its way, which is right where the workers compute on something else
    than the processors that carry tokens; on the same ones the forward would be longer by more than is saved.
    """

    __slots__ = (
        "_audit_failed", "_clock", "_closed", "_executor", "_last_ended", "_next_audit", "_observer",
        "_on_step", "_overlap", "_predict", "_probes", "_progress", "_publish", "_recovery", "_send_first",
        "_under_way", "_untold", "_wake", "failure", "iterations", "lost", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float],
        publish: Publish | None,
        observer: Observer | None = None,
        predict: Predict | None = None,
        overlap: int = 1,
        recovery: Recovery | None = None,
        on_step: Callable[[], None] | None = None,
        send_first: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._publish = publish
        if publish is None:
            scheduler.leave_tokens_untold()
        self._observer = observer
        self._predict = predict
        self._overlap = overlap
        self._recovery = recovery
        self._on_step = on_step
        self._send_first = send_first
        self._under_way: deque[_Launched] = deque()
        self._untold: _Completed | None = None
        self._wake = asyncio.Event()
        self._progress: asyncio.Event | None = None
        self._last_ended = -math.inf
        self._closed = False
        self._probes = 0
        self._next_audit = -math.inf
        self._audit_failed = False
        self.failure: str | None = None
        self.lost: str | None = None
        """Why there are no workers now, while they are being replaced; requests are queued meanwhile."""
        self.iterations = 0
        if recovery is not None:
            recovery.watch(self._wake.set)

    # What others ask of it, from the same event loop.

    def add(self, request: Request, again: bool = False) -> None:
        """Raises RequestRefused, or EngineUnavailable once the workers have failed. See `Scheduler.add`."""
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        self.scheduler.add(request, self._clock(), again)
        self._wake.set()

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        """`finish` STOP: its reader has had all it asked for."""
        if self.scheduler.abort(request_id, finish):
            self._wake.set()

    def wake(self) -> None:
        """Its scheduler has something new to run, or to tell."""
        self._wake.set()

    def end_requests(self, reason: str) -> None:
        """End every request with an error, at once. The workers are there and may be computing."""
        self.scheduler.end_all(reason)
        self._wake.set()

    async def heartbeat(self) -> None:
        """Return once an iteration was completed after this call: one under way, or a probe's if there is none.

        Raises EngineUnavailable where the workers have failed or are being replaced. It takes what it takes: deadlines
        are the caller's.
        """
        seen = self.iterations
        while self.iterations == seen and (self.failure or self.lost) is None:
            if not self._under_way:  # nothing to do, or nothing that can be done now
                self._probes += 1
                probe = Request(
                    f"{PROBE_PREFIX}{self._probes}", (0,), 1, SamplingParams(temperature=0.0), promise=UNPROMISED
                )
                self.add(probe)
            self._progress = self._progress or asyncio.Event()
            await self._progress.wait()
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        if self.iterations == seen:
            raise EngineUnavailable(f"the workers are being replaced: {self.lost}")

    async def run(self) -> None:
        """The loop itself. Returns after `close`, or after a failure without recovery (see `failure`)."""
        try:
            while not self._closed:
                try:
                    await self._step()
                except WorkersLost as lost:
                    await self._replace_workers(lost)
        except Exception as error:
            self._fail(f"the workers failed: {in_words(error)}")
        finally:
            self._tell_completed()
            self._drop_under_way()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # Its steps.

    async def _step(self) -> None:
        """Raises WorkersLost for whatever the executor raises, and where it takes too long."""
        self._launch()
        await self._let_it_go()
        self.tell_ends()
        if self._under_way:
            launched = self._under_way[0]
            if self._recovery is not None:
                await _answered(launched, self._recovery)
            try:
                result = await launched.answer
            except Exception as error:
                raise WorkersLost(in_words(error)) from error
            self._complete(launched, result)
        elif self._recovery is not None and (lost := self._recovery.dead()) is not None:
            raise lost
        else:
            self._audit()
            self._tell_progress()
            self._tell_step()
            await self._wake.wait()
        self._wake.clear()

    def _launch(self) -> None:
        while len(self._under_way) < self._overlap:
            started = self._clock()
            plan = self.scheduler.schedule(started)
            if plan is None:
                return
            under_way = self.scheduler.under_way(plan.iteration)
            predicted = None if self._predict is None else self._predict(under_way.features)
            coming = self._executor.execute(plan)
            answer = coming if isinstance(coming, asyncio.Future) else asyncio.ensure_future(coming)
            self._under_way.append(_Launched(plan, under_way, predicted, started, answer))

    async def _let_it_go(self) -> None:
        """Before tokens are told, where there is somebody to tell them to."""
        if self._send_first and self._under_way and self._untold is not None:
            for _ in range(SENDING_TURNS):
                await asyncio.sleep(0)

    def _complete(self, launched: _Launched, result: IterationResult) -> None:
        self._under_way.popleft()
        ended = self._clock()
        deltas = self.scheduler.commit(result, ended)
        self.iterations += 1
        timings, served = self.scheduler.take_timings(), self.scheduler.take_served()
        record = None
        if self._observer is not None:
            record = IterationRecord(
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
        self._untold = _Completed(deltas, record)
        if record is not None and self._observer is not None:
            self._observer.iteration(record)
        if not self._send_first:
            self._tell_completed()
        self._last_ended = ended
        self._tell_step()
        self._tell_progress()

    async def _replace_workers(self, lost: WorkersLost) -> None:
        """Raises WorkersLost where that cannot be. Requests come and go meanwhile."""
        if self._recovery is None:
            raise lost
        self._drop_under_way()
        self.scheduler.requeue_all()
        self.lost = str(lost)
        replacing = asyncio.ensure_future(self._recovery.replace(lost))
        try:
            while not (replacing.done() or self._closed):
                self.tell_ends()
                self._tell_progress()
                self._wake.clear()
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({replacing, waking}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
            if replacing.done():
                self._executor = replacing.result()
        finally:
            self.lost = None
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)

    def _drop_under_way(self) -> None:
        for launched in self._under_way:
            launched.answer.cancel()
            launched.answer.add_done_callback(hear)
        self._under_way.clear()

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
        self.tell_ends()
        self._tell_progress()

    def tell_ends(self) -> None:
        """Publish what the last iteration brought, if that is still to be done, and then what ended outside of any,
        now rather than with the next one."""
        self._tell_completed()
        if not self.scheduler.has_news:
            return
        deltas, served = self.scheduler.take_deltas(), self.scheduler.take_served()
        self._publish_if_any(deltas)
        if self._observer is not None and (deltas or served):
            self._observer.ends(deltas, served)

    def _tell_completed(self) -> None:
        if self._untold is None:
            return
        (deltas, record), self._untold = self._untold, None
        if deltas:
            self._publish_if_any(deltas)
        if record is not None and self._observer is not None:
            self._observer.afterwards(record)

    def _publish_if_any(self, deltas: list[Delta]) -> None:
        if self._publish is None:
            return
        if self._probes:
            deltas = [delta for delta in deltas if not delta.request_id.startswith(PROBE_PREFIX)]
        if deltas:
            self._publish(deltas)

    def _tell_step(self) -> None:
        """Whoever goes by what the scheduler's sequences have come to, which just may have changed."""
        if self._on_step is not None:
            self._on_step()

    def _tell_progress(self) -> None:
        """Wake everybody who waits for something to happen; each event serves once."""
        if self._progress is not None:
            self._progress.set()
            self._progress = None


async def _answered(launched: _Launched, recovery: Recovery) -> None:
    """Return once the answer is there. Raises WorkersLost where it takes too long."""
    patience = recovery.patience(launched.predicted_s)
    for seconds in (patience, GRACE_S):
        done, _ = await asyncio.wait({launched.answer}, timeout=seconds)
        if done:
            return
    raise WorkersLost(f"no answer within {patience:.0f} s", hung=True)
