"""A workload against a server: what is sent when, and what came of it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp

from cluster.workloads.planned import ClosedLoop, Interference, OpenLoop, PlannedRequest, Workload
from cluster.workloads.prompts import RandomPrompt
from deploy.bench.dialect import Dialect, detect
from deploy.bench.monitor import Progress, Tally, Watcher, watch
from deploy.bench.record import RunRecord
from deploy.bench.sending import Sending
from deploy.bench.target import Target

START_S = 0.05
"""From the last preparation to time 0, so that a request due at 0 is not late by what precedes it."""
WARM_UP_AT_ONCE = 8


async def drive(
    target: Target,
    workload: Workload,
    *,
    progress: Watcher | None = None,
    warmup: int = 0,
    stop: asyncio.Event | None = None,
) -> RunRecord:
    """Send the workload and record every token's time. `warmup` requests of its kind, with prompts of their own, go
    before and are not recorded. `progress` is called a few times a second. Once `stop` is set nothing more is sent and
    what is under way is given up; the record has what was seen. Errors of requests are in their records; raises
    CommandError only where the server cannot be reached or refuses the smallest request beforehand."""
    stop = stop or asyncio.Event()
    tell: Watcher = progress or (lambda _: None)
    async with target.session() as session:
        tell(Progress("detect"))
        run = _Run(session, target, stop)
        await run.until_stopped(run.detect())
        if warmup and run.goes_on:
            tell(Progress("warm-up", planned=warmup))
            await run.until_stopped(run.warm_up(workload, warmup))
        tell(Progress("prepare", planned=len(workload.requests)))
        await run.prepare(workload.requests)
        with _without_long_collections():
            return await run.run(workload, tell)


class _Run:
    """`goes_on` until it is to stop."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, stop: asyncio.Event) -> None:
        self._session = session
        self._target = target
        self._stop = stop
        self._dialect = Dialect(target.model or "", target.endpoint, token_ids=False, fields={})
        self._sendings: list[Sending] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._tally = Tally(0, 0.0)

    @property
    def goes_on(self) -> bool:
        return not self._stop.is_set()

    async def detect(self) -> None:
        async with self._target.client() as client:
            self._dialect = await detect(client, self._target)

    async def until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Returns when the work is done or the run is to stop; raises what the work raises."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, stopping, *self._tasks):
                task.cancel()
            await asyncio.gather(working, stopping, *self._tasks, return_exceptions=True)

    async def warm_up(self, workload: Workload, count: int) -> None:
        """What becomes of these requests is nobody's concern: the run itself will show what is wrong."""
        plans = list(workload.requests)
        chosen = [_with_own_prompt(plans[number % len(plans)], number) for number in range(count)] if plans else []
        free = asyncio.Semaphore(WARM_UP_AT_ONCE)

        async def one(plan: PlannedRequest) -> None:
            async with free:
                sending = Sending(plan, self._dialect.encoded(plan, self._target), time.perf_counter())
                await sending.run(self._session, self._target.base + self._target.path)

        await asyncio.gather(*(one(plan) for plan in chosen))

    async def prepare(self, plans: Sequence[PlannedRequest]) -> None:
        """All bodies as bytes, before the first is due: about six bytes for each token of a prompt."""
        for plan in plans:
            if not self.goes_on:
                return
            self._sendings.append(Sending(plan, self._dialect.encoded(plan, self._target), 0.0))
            await asyncio.sleep(0)

    async def run(self, workload: Workload, tell: Watcher) -> RunRecord:
        planned = len(workload.requests)
        origin, started_at = time.perf_counter() + START_S, time.time() + START_S
        for sending in self._sendings:
            sending.origin = origin
        self._tally = Tally(planned, origin)
        watching = asyncio.ensure_future(watch(tell, self._tally))
        try:
            if self.goes_on:
                await asyncio.sleep(START_S)
                await self.until_stopped(self._follow(workload, origin))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        duration_s = time.perf_counter() - origin
        tell(self._tally.progress())
        records = [sending.record for sending in self._sendings if sending.record is not None]
        return RunRecord(
            requests=tuple(sorted(records, key=lambda record: record.sent_s)),
            duration_s=duration_s,
            started_at=started_at,
            open_loop=isinstance(workload, OpenLoop),
            interrupted=not self.goes_on,
            planned=planned,
            facts=self._facts(workload),
        )

    async def _follow(self, workload: Workload, origin: float) -> None:
        if isinstance(workload, OpenLoop):
            await self._open(origin)
        elif isinstance(workload, ClosedLoop):
            await self._closed(workload.concurrency)
        else:
            await self._interfere(workload)

    async def _open(self, origin: float) -> None:
        """By the clock alone: nothing here waits for a server."""
        for sending in self._sendings:
            await asyncio.sleep(max(0.0, origin + sending.plan.at_s - time.perf_counter()))
            self._start(sending)
        await asyncio.gather(*self._tasks)

    async def _closed(self, concurrency: int) -> None:
        waiting = iter(self._sendings)

        async def worker() -> None:
            for sending in waiting:  # shared by all workers: each takes the next one
                sending.plan = replace(sending.plan, at_s=max(0.0, time.perf_counter() - sending.origin))
                await self._start(sending)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _interfere(self, workload: Interference) -> None:
        """A stream that ends early holds nobody up: the long prompt is sent, and the figures say what was seen."""
        *streams, long = self._sendings
        for stream in streams:
            stream.lead = workload.lead
            self._start(stream)
        for stream in streams:
            await stream.led.wait()
        long.plan = replace(long.plan, at_s=time.perf_counter() - long.origin)
        await self._start(long)
        for stream in streams:
            stream.enough = len(stream.clock.times) + workload.tail
        await asyncio.gather(*self._tasks)

    def _start(self, sending: Sending) -> asyncio.Task[None]:
        task = asyncio.create_task(sending.run(self._session, self._target.base + self._target.path))
        self._tasks.append(task)
        self._tally.started(sending)
        return task

    def _facts(self, workload: Workload) -> dict[str, Any]:
        names = {OpenLoop: "open loop", ClosedLoop: "closed loop", Interference: "interference"}
        return {
            "url": self._target.url,
            "model": self._dialect.model,
            "endpoint": self._target.endpoint,
            "prompts": "token ids" if self._dialect.token_ids else "text",
            "fields": sorted(self._dialect.fields),
            "loop": names[type(workload)],
        }


@contextmanager
def _without_long_collections() -> Iterator[None]:
    """What there is already is not looked through for garbage meanwhile: with all that a process has imported, that
    stops every stream for tens of milliseconds, and would be taken for the server's stall."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _with_own_prompt(plan: PlannedRequest, number: int) -> PlannedRequest:
    """The same length and other content, so that no cache knows the run's prompts beforehand."""
    if isinstance(plan.prompt, RandomPrompt):
        return replace(plan, prompt=RandomPrompt(plan.prompt.tokens, f"warm-up/{number}"))
    return plan
