"""Groups that serve a load on a virtual clock: the server's schedulers and loops, over executors that take time."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from cluster.assembly import Common, make_scheduler
from cluster.config import EngineConfig
from cluster.loop import IterationLoop, IterationRecord
from cluster.roles import GroupKind
from cluster.routing import Groups
from cluster.simulated.executor import SimulatedExecutor, until
from cluster.simulated.groups import kinds_of
from cluster.simulated.machine import Machine
from cluster.simulated.prompts import prompt_tokens
from cluster.simulated.seen import KeptRequests, SeenIterations, SeenRequest, Simulation, Step
from cluster.simulated.totals import Totals
from cluster.simulated.transfers import SimulatedTransfers
from cluster.simulated.virtual_time import VirtualLoop, run_virtual
from cluster.tuning import Tuning, promise_book
from cluster.workloads import ClosedLoop, Interference, OpenLoop, PlannedRequest, Workload
from scheduler.costmodel import OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.progress import InFlight, Served
from scheduler.request import Delta, Finish, Request
from scheduler.slo import Outcome


@dataclass(frozen=True, slots=True)
class Noise:
    """Iterations take exp(sigma x normal - sigma^2 / 2) times what was predicted: 1 on the average. 0: exactly that."""

    sigma: float = 0.0
    seed: int = 0

    def factors(self, group: int) -> Callable[[], float]:
        if self.sigma == 0:
            return lambda: 1.0
        source = random.Random(f"{self.seed}/{group}/noise")
        return lambda: source.lognormvariate(-self.sigma * self.sigma / 2, self.sigma)


EXACT = Noise()


def simulate(
    config: EngineConfig,
    machine: Machine,
    workload: Workload,
    noise: Noise = EXACT,
    may_miss: int | None = None,
    keep_steps: bool = False,
) -> Simulation:
    """Serve the workload from its first request to the end of its last one, or until more than `may_miss` requests have
    ended without having been served as promised. `keep_steps`: each single iteration is in the simulation as well."""
    return run_virtual(
        lambda loop: SimulatedCluster(config, machine, noise, loop, may_miss, keep_steps).serve(workload)
    )


def simulate_stream(
    config: EngineConfig,
    machine: Machine,
    requests: Iterable[PlannedRequest],
    noise: Noise = EXACT,
    totals: Totals | None = None,
) -> tuple[Totals, Simulation]:
    """Serve requests that come in order of `at_s` and are made as they are due, and keep totals of them only, so that
    memory does not grow with their number. There are no requests in the simulation."""
    totals = totals or Totals()

    def serve(loop: VirtualLoop) -> Coroutine[Any, Any, Simulation]:
        return SimulatedCluster(config, machine, noise, loop, totals=totals).serve(requests)

    return totals, run_virtual(serve)


class SimulatedCluster:
    """`config.groups` groups of one machine's kind behind one router, to be made and used on a virtual loop."""

    def __init__(
        self,
        config: EngineConfig,
        machine: Machine,
        noise: Noise,
        loop: VirtualLoop,
        may_miss: int | None = None,
        keep_steps: bool = False,
        totals: Totals | None = None,
    ) -> None:
        self._machine = machine
        self._virtual = loop
        cost = OnlineCostModel(machine.cost)
        self._tuning = Tuning(cost, promise_book(config, cost))
        self._seen: dict[str, SeenRequest] = {}
        self._kept = KeptRequests()
        self._keeper: KeptRequests | Totals = self._kept if totals is None else totals
        self._numbers = itertools.count()
        self._ends: dict[str, asyncio.Event] = {}
        self._may_miss = math.inf if may_miss is None else may_miss
        self._missed = 0
        self._hopeless = asyncio.Event()
        self._iterations = SeenIterations()
        self._steps: list[Step] | None = [] if keep_steps else None
        self._came: asyncio.Event | None = None
        self._common = Common()
        self.loops = [self._group(kind, number, noise.factors(number)) for number, kind in enumerate(kinds_of(config))]
        self._entries = self.loops[: config.prefill_groups] if config.separated else self.loops
        self._groups = Groups([loop.scheduler for loop in self._entries])
        self._transfers: SimulatedTransfers | None = None
        if config.separated:
            if machine.link is None:
                raise ValueError("a calibration does not say what lies between two groups; give --gpu")
            self._transfers = SimulatedTransfers(dict(enumerate(self.loops)), machine.link, loop)

    def _group(self, kind: GroupKind, number: int, factor: Callable[[], float]) -> IterationLoop:
        info = self._machine.info
        scheduler = make_scheduler(kind.config, info, self._tuning, role=kind.role, common=self._common)
        predict = self._machine.cost.predict

        def duration(under_way: InFlight) -> float:
            return factor() * sum(map(predict, under_way.features))

        return IterationLoop(
            scheduler,
            SimulatedExecutor(scheduler.under_way, duration, self._virtual),
            clock=self._virtual.time,
            publish=None,
            observer=_Numbered(self, number),
            overlap=kind.config.overlap,
        )

    async def serve(self, workload: Workload | Iterable[PlannedRequest]) -> Simulation:
        running = [asyncio.create_task(loop.run()) for loop in self.loops]
        following = asyncio.create_task(self._follow(workload))
        hopeless = asyncio.create_task(self._hopeless.wait())
        await asyncio.wait([following, hopeless], return_when=asyncio.FIRST_COMPLETED)
        ended = self._virtual.time()
        for loop in self.loops:
            loop.close()
        for task in (following, hopeless):
            task.cancel()
        await asyncio.gather(*running, following, hopeless, return_exceptions=True)
        if not following.cancelled():
            following.result()
        for loop in self.loops:
            if loop.failure is not None:  # a fault of the simulation: nothing in it can fail
                raise RuntimeError(loop.failure)
        groups = len(self.loops)
        gpus = groups * self._machine.info.tp
        given_up, steps = self._hopeless.is_set(), tuple(self._steps or ())
        moved = () if self._transfers is None else tuple(self._transfers.moved)
        return Simulation(self._kept.requests, self._iterations, ended, groups, gpus, given_up, steps, moved)

    async def _follow(self, workload: Workload | Iterable[PlannedRequest]) -> None:
        if isinstance(workload, OpenLoop):
            await self._open(workload.requests)
        elif isinstance(workload, ClosedLoop):
            await self._closed(workload)
        elif isinstance(workload, Interference):
            await self._interfere(workload)
        else:
            await self._open(workload)

    async def _open(self, requests: Iterable[PlannedRequest]) -> None:
        for planned in requests:
            await until(planned.at_s)
            self.submit(planned)
        for ended in list(self._ends.values()):
            await ended.wait()

    async def _closed(self, workload: ClosedLoop) -> None:
        waiting = iter(workload.requests)

        async def worker() -> None:
            for planned in waiting:  # shared by all workers: each takes the next one
                ended = self.submit(planned)
                if ended is not None:
                    await ended.wait()

        await asyncio.gather(*(worker() for _ in range(workload.concurrency)))

    async def _interfere(self, workload: Interference) -> None:
        """As the load test does it: the long prompt once each stream has had its lead or has ended, and the readers
        leave a tail after its end."""
        ends = [self.submit(stream) for stream in workload.streams]
        streams = self._kept.requests[: len(ends)]
        await self._until(lambda: all(_over(stream) or len(stream.tokens) >= workload.lead for stream in streams))
        long = self.submit(workload.long)
        if long is not None:
            await long.wait()
        enough = [len(stream.tokens) + workload.tail for stream in streams]

        async def leave(number: int) -> None:
            stream = streams[number]
            await self._until(lambda: _over(stream) or len(stream.tokens) >= enough[number])
            if not _over(stream):
                stream.left = True
                for loop in self.loops:
                    loop.abort(str(number), Finish.STOP)
                await self._until(lambda: _over(stream))

        await asyncio.gather(*(leave(number) for number in range(len(streams))))

    def _advance(self) -> None:
        if self._transfers is not None:
            self._transfers.advance()

    async def _until(self, true: Callable[[], bool]) -> None:
        """Looked at whenever a token came or a request ended."""
        while not true():
            self._came = self._came or asyncio.Event()
            await self._came.wait()

    def _tell(self) -> None:
        if self._transfers is not None:
            self._transfers.advance()
        if self._came is not None:
            self._came.set()
            self._came = None

    def submit(self, planned: PlannedRequest) -> asyncio.Event | None:
        """Give a request to the group with the smallest predicted TTFT. Returns what its end sets; None: refused."""
        number, now = next(self._numbers), self._virtual.time()
        prompt = prompt_tokens(planned, number, self._machine.info.vocab_size)
        service = slo_class_of(planned)
        request = Request(str(number), prompt, planned.output_tokens, slo_class=service)
        seen = SeenRequest(planned, now, len(prompt), self._tuning.promises.promise(len(prompt), service))
        self._keeper.came(seen)
        try:
            self._entries[self._groups.choose(request, now)].add(request)
        except RequestRefused as refused:
            seen.refused = refused.code
            self._note_end(seen, None)
            return None
        self._seen[request.request_id] = seen
        self._advance()
        return self._ends.setdefault(request.request_id, asyncio.Event())

    # What the loops tell.

    def iteration(self, record: IterationRecord, group: int) -> None:
        self._iterations.note(record)
        if self._steps is not None:
            self._steps.append(Step(group, record.started, record.ended, record.prefill_tokens, record.decodes))
        self._tuning.observe(record)
        for chunk in record.under_way.chunks:
            seen = self._seen.get(chunk.request_id)  # None: it ended while its last iteration was under way
            if seen is not None and seen.scheduled is None:
                seen.scheduled = record.started
        self._keeper.tokens_came(record, self._seen)
        if record.deltas:
            self.ends(record.deltas, record.served)
        else:
            self._tell()

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        fared = {of.request_id: of.outcome for of in served}
        for delta in deltas:
            if delta.finish is not None:
                seen = self._seen.pop(delta.request_id)
                seen.ended = self._virtual.time()
                if not seen.left and (delta.finish is not Finish.LENGTH or delta.reason is not None):
                    seen.lost = delta.reason or delta.finish.value
                self._ends.pop(delta.request_id).set()
                self._note_end(seen, fared.get(delta.request_id))
        self._tell()

    def _note_end(self, seen: SeenRequest, fared: Outcome | None) -> None:
        self._keeper.ended(seen, fared)
        if self._may_miss < math.inf and not seen.as_promised(fared):
            self._missed += 1
            if self._missed > self._may_miss:
                self._hopeless.set()


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Tells the cluster of one group's iterations whose they are."""

    cluster: SimulatedCluster
    number: int

    def iteration(self, record: IterationRecord) -> None:
        self.cluster.iteration(record, self.number)

    def afterwards(self, record: IterationRecord) -> None:
        """Nobody waits."""

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        self.cluster.ends(deltas, served)


def slo_class_of(planned: PlannedRequest) -> str:
    """The class of service that it asks for by name, as in a request's body."""
    asked = planned.extra.get("slo")
    return asked if isinstance(asked, str) else ""


def _over(request: SeenRequest) -> bool:
    return request.ended is not None or request.refused is not None
