"""Groups that serve a load on a virtual clock: the server's schedulers and loops, over executors that take time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.assembly import make_scheduler
from cluster.config import EngineConfig
from cluster.loop import IterationLoop, IterationRecord
from cluster.routing import least_loaded
from cluster.simulated.executor import SimulatedExecutor, until
from cluster.simulated.machine import Machine
from cluster.simulated.prompts import prompt_tokens
from cluster.simulated.seen import SeenIterations, SeenRequest, Simulation
from cluster.simulated.virtual_time import VirtualLoop, run_virtual
from cluster.tuning import Tuning, promise_book
from cluster.workloads import ClosedLoop, OpenLoop, PlannedRequest
from scheduler.costmodel import OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.progress import InFlight, Served
from scheduler.request import Delta, Finish, Request

Workload = OpenLoop | ClosedLoop


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
    config: EngineConfig, machine: Machine, workload: Workload, noise: Noise = EXACT, may_miss: int | None = None
) -> Simulation:
    """Serve the workload from its first request to the end of its last one, or until more than `may_miss` requests have
    ended without having been served as promised."""
    return run_virtual(lambda loop: SimulatedCluster(config, machine, noise, loop, may_miss).serve(workload))


class SimulatedCluster:
    """`config.groups` groups of one machine's kind behind one router, to be made and used on a virtual loop."""

    def __init__(
        self, config: EngineConfig, machine: Machine, noise: Noise, loop: VirtualLoop, may_miss: int | None = None
    ) -> None:
        if config.separated:
            raise ValueError("--mode separated is not simulated yet; take --mode colocated")
        self._machine = machine
        self._virtual = loop
        cost = OnlineCostModel(machine.cost)
        self._tuning = Tuning(cost, promise_book(config, cost))
        self._seen: dict[str, SeenRequest] = {}
        self._requests: list[SeenRequest] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._may_miss = math.inf if may_miss is None else may_miss
        self._missed = 0
        self._hopeless = asyncio.Event()
        self._iterations = SeenIterations()
        self.loops = [self._group(config, noise.factors(number)) for number in range(config.groups)]

    def _group(self, config: EngineConfig, factor: Callable[[], float]) -> IterationLoop:
        scheduler = make_scheduler(config, self._machine.info, self._tuning)
        predict = self._machine.cost.predict

        def duration(under_way: InFlight) -> float:
            return factor() * sum(map(predict, under_way.features))

        return IterationLoop(
            scheduler,
            SimulatedExecutor(scheduler.under_way, duration),
            clock=self._virtual.time,
            publish=lambda deltas: None,
            observer=self,
            overlap=config.overlap,
        )

    async def serve(self, workload: Workload) -> Simulation:
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
        return Simulation(self._requests, self._iterations, ended, groups, gpus, self._hopeless.is_set())

    async def _follow(self, workload: Workload) -> None:
        if isinstance(workload, OpenLoop):
            await self._open(workload)
        else:
            await self._closed(workload)

    async def _open(self, workload: OpenLoop) -> None:
        for planned in workload.requests:
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

    def submit(self, planned: PlannedRequest) -> asyncio.Event | None:
        """Give a request to the group with the fewest outstanding tokens. Returns what its end sets; None: refused."""
        number, now = len(self._requests), self._virtual.time()
        prompt = prompt_tokens(planned, number, self._machine.info.vocab_size)
        request = Request(str(number), prompt, planned.output_tokens)
        seen = SeenRequest(planned, now, len(prompt), self._tuning.promises.promise(len(prompt)))
        self._requests.append(seen)
        try:
            least_loaded(self.loops).add(request)
        except RequestRefused as refused:
            seen.refused = refused.code
            self._note_miss(seen)
            return None
        self._seen[request.request_id] = seen
        return self._ends.setdefault(request.request_id, asyncio.Event())

    # What the loops tell.

    def iteration(self, record: IterationRecord) -> None:
        self._iterations.note(record)
        self._tuning.observe(record)
        for chunk in record.under_way.chunks:
            seen = self._seen.get(chunk.request_id)  # None: it ended while its last iteration was under way
            if seen is not None and seen.scheduled is None:
                seen.scheduled = record.started
        for timing in record.timings:
            self._seen[timing.request_id].tokens.append(record.ended)
        self.ends(record.deltas, record.served)

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                seen = self._seen.pop(delta.request_id)
                seen.ended = self._virtual.time()
                if delta.finish is not Finish.LENGTH or delta.reason is not None:
                    seen.lost = delta.reason or delta.finish.value
                self._ends.pop(delta.request_id).set()
                self._note_miss(seen)

    def _note_miss(self, seen: SeenRequest) -> None:
        if self._may_miss < math.inf and not seen.met:
            self._missed += 1
            if self._missed > self._may_miss:
                self._hopeless.set()
