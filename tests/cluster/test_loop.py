"""The iteration loop over the strict bookkeeping worker: order, overlap, failure, heartbeat, publication."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from cluster.engine import EngineUnavailable
from cluster.loop import PROBE_PREFIX, IterationLoop, IterationRecord
from cluster.mailbox import Mailboxes
from scheduler.errors import RequestRefused
from scheduler.plan import IterationPlan, IterationResult
from scheduler.policies import make_policy
from scheduler.progress import Served
from scheduler.request import Delta, Finish, Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.cluster.looped import Looped
from tests.scheduler.world import VOCAB, StrictWorker, expected_tokens


class StrictExecutor:
    """Executes on the event loop, yielding in between; fails or hangs at a given iteration."""

    def __init__(self, config: SchedulerConfig, fail_at: int | None = None, hang_at: int | None = None) -> None:
        self.worker = StrictWorker(config.block_size, config.num_blocks, config.max_running)
        self.fail_at, self.hang_at = fail_at, hang_at
        self.most_under_way = self.under_way = self.sent = 0
        self._turn = asyncio.Lock()

    async def execute(self, plan: IterationPlan) -> IterationResult:
        """As a group does: its transport's way is a task of its own."""
        return await asyncio.ensure_future(self._compute(plan))

    async def _compute(self, plan: IterationPlan) -> IterationResult:
        self.sent += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        async with self._turn:
            await asyncio.sleep(0)
            if plan.iteration == self.hang_at:
                await asyncio.Event().wait()
            if plan.iteration == self.fail_at:
                raise ConnectionError("rank 1 is gone")
            result = self.worker.execute(plan)
        self.under_way -= 1
        return result

    async def close(self) -> None:
        pass


CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=100, vocab_size=VOCAB, max_running=8)


class Rig(Looped):
    """A running loop with what it published."""

    def __init__(self, overlap: int = 1, send_first: bool = False, **faults: int) -> None:
        ticks = itertools.count()
        self.published: list[list[Delta]] = []
        self.records: list[IterationRecord] = []
        self.sent_by_then: list[tuple[int, int]] = []
        """Plans, when an iteration was observed, and when it was told."""
        self.ended: list[str] = []
        self.observer_fails_at = 0
        self.mailboxes = Mailboxes()
        self.executor = StrictExecutor(CONFIG, **faults)
        self.loop = IterationLoop(
            Scheduler(CONFIG, make_policy("chunked", chunk_size=7)),
            self.executor,
            clock=lambda: float(next(ticks)),
            publish=self.publish,
            observer=self,
            overlap=overlap,
            send_first=send_first,
        )
        self.task = asyncio.create_task(self.loop.run())

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)
        self._observed_at = self.executor.sent
        if len(self.records) == self.observer_fails_at:
            raise ZeroDivisionError

    def afterwards(self, record: IterationRecord) -> None:
        assert record is self.records[-1]
        self.sent_by_then.append((self._observed_at, self.executor.sent))

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        self.ended += [delta.request_id for delta in deltas if delta.finish]

    def publish(self, deltas: list[Delta]) -> None:
        self.published.append(deltas)
        self.mailboxes.deliver(deltas)


def requests(count: int) -> list[Request]:
    return [Request(f"r{i}", tuple(range(1, 10 + 3 * i)), 6 + i) for i in range(count)]


@pytest.mark.parametrize("overlap", [1, 2])
async def test_streams_get_their_tokens_and_an_iteration_is_published_once(overlap: int) -> None:
    rig = Rig(overlap)
    outcomes = await asyncio.gather(*(rig.generate(r) for r in requests(5)))
    await rig.close()
    for request, (tokens, last) in zip(requests(5), outcomes, strict=True):
        assert tokens == expected_tokens(request)
        assert last.finish is Finish.LENGTH
    assert rig.executor.most_under_way == overlap
    assert len(rig.published) <= rig.loop.iterations == len(rig.records)
    assert max(len(deltas) for deltas in rig.published) >= 3, "all streams of an iteration travel together"
    assert [r.plan.iteration for r in rig.records] == list(range(1, len(rig.records) + 1))
    assert all(r.started < r.ended for r in rig.records)
    assert rig.loop.scheduler.pool.available == CONFIG.num_blocks


@pytest.mark.parametrize("first", [True, False])
async def test_the_workers_have_their_next_plan_before_tokens_are_told_where_that_is_asked_for(first: bool) -> None:
    rig = Rig(send_first=first)
    await asyncio.gather(*(rig.generate(r) for r in requests(3)))
    await rig.close()
    last = rig.loop.iterations
    assert rig.sent_by_then == [(number, min(number + first, last)) for number in range(1, last + 1)]


@pytest.mark.parametrize("fault", ["closed", "observer"])
@pytest.mark.parametrize("first", [True, False])
async def test_what_an_iteration_brought_is_told_whatever_comes_after_it(fault: str, first: bool) -> None:
    rig = Rig(send_first=first)
    last = Request("r", tuple(range(1, 5)), 3)
    answer = asyncio.ensure_future(rig.generate(last))
    while rig.executor.sent < 3:  # noqa: ASYNC110 - by turns of the loop
        await asyncio.sleep(0)
    if fault == "closed":
        rig.loop.close()
    else:
        rig.observer_fails_at = 3
    tokens, end = await asyncio.wait_for(answer, 5)
    assert (tokens, end.finish) == (expected_tokens(last), Finish.LENGTH)
    assert [record.plan.iteration for record in rig.records] == [1, 2, 3]
    await rig.close()


async def test_failed_workers_end_every_stream_and_refuse_the_next() -> None:
    rig = Rig(fail_at=3)
    outcomes = await asyncio.gather(*(rig.generate(r) for r in requests(3)))
    assert {last.finish for _, last in outcomes} == {Finish.ERROR}
    assert all("rank 1 is gone" in (last.reason or "") for _, last in outcomes)
    with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
        rig.loop.add(requests(1)[0])
    with pytest.raises(EngineUnavailable, match="rank 1 is gone"):
        await rig.loop.heartbeat()
    await asyncio.wait_for(rig.task, 5)


async def test_a_heartbeat_is_a_real_iteration_idle_or_busy() -> None:
    rig = Rig()
    await asyncio.wait_for(rig.loop.heartbeat(), 5)
    assert rig.loop.iterations == 1
    assert rig.published == [], "nobody hears of a probe"
    stream = asyncio.create_task(rig.generate(Request("r", (1, 2), 50)))
    await asyncio.sleep(0.01)
    seen = rig.loop.iterations
    await asyncio.wait_for(rig.loop.heartbeat(), 5)
    assert rig.loop.iterations > seen
    await stream
    assert not any(d.request_id.startswith(PROBE_PREFIX) for deltas in rig.published for d in deltas)
    await rig.close()


async def test_a_heartbeat_of_hung_workers_never_comes() -> None:
    rig = Rig(hang_at=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.loop.heartbeat(), 0.2)
    rig.task.cancel()


async def test_a_consumer_that_leaves_frees_its_request() -> None:
    rig = Rig()
    rig.mailboxes.open("r")
    rig.loop.add(Request("r", (1, 2, 3), 90))
    deltas = rig.mailboxes.read("r", rig.loop.abort)
    await anext(deltas)
    await deltas.aclose()
    seen = rig.loop.iterations
    for _ in range(20):
        await asyncio.sleep(0)
    assert rig.loop.scheduler.idle
    assert rig.loop.iterations <= seen + 1
    assert rig.loop.scheduler.pool.available == CONFIG.num_blocks
    await rig.close()


async def test_one_id_has_one_consumer() -> None:
    boxes = Mailboxes()
    boxes.open("r")
    with pytest.raises(RequestRefused, match="already"):
        boxes.open("r")
