"""Cases 21 and 26 without processes: a loop whose workers are lost goes on with others, and no stream notices but by
the pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from cluster.engine import EngineUnavailable
from cluster.executor import Executor
from cluster.loop import IterationLoop
from cluster.mailbox import Mailboxes
from cluster.recovery import HANG_FACTOR, WorkersLost, in_words, patience
from scheduler.losses import MOST_LOSSES
from scheduler.plan import IterationPlan, IterationResult
from scheduler.policies import make_policy
from scheduler.request import Finish, Request
from scheduler.scheduler import Scheduler
from tests.cluster.looped import Looped
from tests.cluster.test_loop import CONFIG, requests
from tests.scheduler.world import StrictWorker, expected_tokens


class FragileExecutor:
    """Fails or hangs before or after an iteration, as `fault` says: None, `dies`, `hangs` or `dies after`."""

    def __init__(self, worker: StrictWorker, fault: Callable[[IterationPlan], str | None]) -> None:
        self.worker = worker
        self._fault = fault
        self._broken = False
        self._turn = asyncio.Lock()

    async def execute(self, plan: IterationPlan) -> IterationResult:
        async with self._turn:
            await asyncio.sleep(0)
            fault = self._fault(plan)
            if fault == "hangs":
                await asyncio.Event().wait()
            if fault == "dies" or self._broken:
                self._broken = True
                raise ConnectionError("rank 1 is gone")
            result = self.worker.execute(plan)
            if fault == "dies after":
                self._broken = True
                raise ConnectionError("rank 1 is gone")
            return result

    async def close(self) -> None:
        pass


class Rig(Looped):
    """A running loop, its recovery, and what it published. `gate` holds a replacement up until it is set."""

    def __init__(self, fault: Callable[[IterationPlan], str | None], overlap: int = 1, most: int = 1000) -> None:
        self.fault, self.most = fault, most
        self.mailboxes = Mailboxes()
        self.lost: list[WorkersLost] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.wake: Callable[[], None] = lambda: None
        self.died: WorkersLost | None = None
        self.loop = IterationLoop(
            Scheduler(CONFIG, make_policy("chunked", chunk_size=7)),
            self._executor(),
            clock=asyncio.get_running_loop().time,
            publish=self.mailboxes.deliver,
            overlap=overlap,
            recovery=self,
        )
        self.task = asyncio.create_task(self.loop.run())

    def _executor(self, last_iteration: int = 0) -> FragileExecutor:
        worker = StrictWorker(CONFIG.block_size, CONFIG.num_blocks, CONFIG.max_running, last_iteration=last_iteration)
        return FragileExecutor(worker, self.fault)

    def watch(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def dead(self) -> WorkersLost | None:
        return self.died

    def patience(self, predicted_s: float | None) -> float:
        return 0.05

    async def replace(self, lost: WorkersLost) -> Executor:
        self.lost.append(lost)
        self.died = None
        await self.gate.wait()
        if len(self.lost) > self.most:
            raise WorkersLost(f"{lost}; given up")
        return self._executor(self.loop.scheduler.stats()["iterations"])

    async def until_lost(self) -> None:
        while not self.lost:  # noqa: ASYNC110 - bounded by the test's own time
            await asyncio.sleep(0)


def at(**faults: str) -> Callable[[IterationPlan], str | None]:
    """Faults by iteration, such as i3="dies"."""
    return lambda plan: faults.get(f"i{plan.iteration}")


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("how", ["dies", "dies after", "hangs"])
async def test_every_stream_goes_on_with_the_tokens_it_would_have_had(how: str, overlap: int) -> None:
    rig = Rig(at(i1=how, i6=how), overlap)
    outcomes = await asyncio.gather(*(rig.generate(r) for r in requests(5)))
    for request, (tokens, last) in zip(requests(5), outcomes, strict=True):
        assert tokens == expected_tokens(request)
        assert last.finish is Finish.LENGTH
    assert [lost.hung for lost in rig.lost] == [how == "hangs"] * 2
    assert rig.loop.scheduler.stats()["worker_losses"] == 2
    assert rig.loop.scheduler.pool.referenced == 0
    await rig.close()


async def test_losses_at_random_points() -> None:
    rnd = random.Random(7)
    kinds = (*[None] * 18, "dies", "dies after")
    rig = Rig(lambda plan: rnd.choice(kinds) if len(rig.lost) < 10 else None, overlap=2)
    wanted = [Request(f"r{i}", tuple(range(1, 6 + i)), 70 + i) for i in range(8)]
    outcomes = await asyncio.gather(*(rig.generate(r) for r in wanted))
    assert len(rig.lost) == 10
    for request, (tokens, last) in zip(wanted, outcomes, strict=True):
        assert (tokens, last.finish) == (expected_tokens(request), Finish.LENGTH)
    await rig.close()


async def test_meanwhile_health_says_so_and_requests_come_and_go() -> None:
    rig = Rig(at(i3="dies"))
    rig.gate.clear()
    running = asyncio.create_task(rig.generate(requests(1)[0]))
    await rig.until_lost()
    with pytest.raises(EngineUnavailable, match=r"being replaced: .*rank 1 is gone"):
        await rig.loop.heartbeat()
    queued = asyncio.create_task(rig.generate(Request("queued", (1, 2, 3), 5)))
    left = asyncio.create_task(rig.generate(Request("left", (1, 2, 3), 5)))
    await asyncio.sleep(0.01)
    assert not queued.done()
    rig.loop.abort("left")
    assert (await asyncio.wait_for(left, 5))[1].finish is Finish.ABORT
    rig.gate.set()
    assert (await running)[0] == expected_tokens(requests(1)[0])
    assert (await queued)[0] == expected_tokens(Request("queued", (1, 2, 3), 5))
    await asyncio.wait_for(rig.loop.heartbeat(), 5)
    await rig.close()


async def test_workers_that_die_while_idle_are_replaced_at_once() -> None:
    rig = Rig(at())
    await asyncio.sleep(0.01)
    rig.died = WorkersLost("rank 0 died")
    rig.wake()
    await rig.until_lost()
    await rig.close()


async def test_a_loop_whose_recovery_gives_up_ends_its_requests_with_the_reason() -> None:
    rig = Rig(at(i3="dies"), most=0)
    _, last = await rig.generate(requests(1)[0])
    assert last.finish is Finish.ERROR
    assert last.reason == "the workers failed: ConnectionError: rank 1 is gone; given up"
    with pytest.raises(EngineUnavailable, match="given up"):
        rig.loop.add(requests(1)[0])
    await asyncio.wait_for(rig.task, 5)


async def test_a_request_that_the_workers_die_of_ends_alone() -> None:
    """The others share some of its iterations, and get on in those between."""
    rig = Rig(lambda plan: "dies" if any(13 in a.tokens for a in plan.admissions) else None)
    fatal = asyncio.create_task(rig.generate(Request("fatal", (13, 1, 2), 5)))
    tokens, last = await asyncio.wait_for(fatal, 10)
    assert (tokens, last.finish) == ([], Finish.ERROR)
    assert last.reason == f"the workers were lost {MOST_LOSSES} times while they computed this"
    assert len(rig.lost) == MOST_LOSSES
    assert (await rig.generate(requests(1)[0]))[0] == expected_tokens(requests(1)[0])
    await rig.close()


async def test_closing_does_not_wait_for_a_replacement() -> None:
    rig = Rig(at(i3="dies"))
    rig.gate.clear()
    running = asyncio.create_task(rig.generate(requests(1)[0]))
    await rig.until_lost()
    await rig.close()
    running.cancel()


def test_patience_follows_the_prediction() -> None:
    assert patience(30, 2.0) == 30 + HANG_FACTOR * 2.0
    assert patience(30, None) == 30 + HANG_FACTOR * 30


def test_a_nested_error_is_one_line() -> None:
    nested = RuntimeError("ray::RankActor.execute()\n  File x\nValueError: the tensor is too large\n")
    assert in_words(nested) == "RuntimeError: ValueError: the tensor is too large"
    assert in_words(TimeoutError()) == "TimeoutError"
