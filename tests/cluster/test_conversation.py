"""Front ends and their scheduler without Ray: the real handle and the real actor's methods, over the strict worker. The
actor dies at random points, and every stream has to get exactly its tokens."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from cluster import async_cluster, scheduler_actor
from cluster.async_cluster import AsyncCluster
from cluster.config import EngineConfig
from cluster.engine import EngineUnavailable
from cluster.recovery import WorkersLost
from cluster.scheduler_actor import SchedulerActor
from cluster.token_line import TokenEar
from scheduler.errors import RequestRefused
from scheduler.plan import IterationPlan, IterationResult
from scheduler.request import Delta, Finish, Request
from tests.scheduler.world import VOCAB, StrictWorker, expected_tokens
from workers.config import WorkerDescription

CONFIG = EngineConfig(
    policy="chunked", chunk_size=7, profile_seconds=0, num_blocks=128, block_size=4, max_running=16, max_model_len=100
)


class StrictGroup:
    """What the actor asks of a worker group."""

    transport, num_blocks, swap_blocks = "none", 128, 0
    incidents: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._worker = StrictWorker(4, 128, 16)
        described: Any = WorkerDescription
        facts = dict.fromkeys(inspect.signature(described).parameters, 0)
        texts = {"device": "cpu", "dtype": "float32", "attention": "cpu", "collectives": "none"}
        sizes = {"block_size": 4, "max_model_len": 100, "vocab_size": VOCAB}
        self.descriptions = [described(**{**facts, **texts, **sizes})]

    async def execute(self, plan: IterationPlan) -> IterationResult:
        await asyncio.sleep(0)
        return self._worker.execute(plan)

    async def close(self) -> None:
        pass

    async def give_back(self) -> None:
        pass

    def patience(self, predicted_s: float | None) -> float:
        return 60.0

    def watch(self, wake: Callable[[], None]) -> None:
        pass

    def dead(self) -> WorkersLost | None:
        return None


class Handle:
    """As Ray's handle of the actor: `handle.method.remote(...)`, which fails when the process dies meanwhile."""

    def __init__(self) -> None:
        self.gone = False
        self.deaths = -1
        self.die()

    def die(self) -> None:
        if self.deaths >= 0:
            self.death.set()
            self.actor._subscribers.hang_up()
            for task in self.actor._tasks:
                task.cancel()
        self.deaths += 1
        self.death = asyncio.Event()
        self.actor = SchedulerActor(CONFIG, "name", "namespace")

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            def remote(self, *arguments: Any) -> asyncio.Task[Any]:
                return asyncio.ensure_future(handle._call(name, arguments))

        return Method()

    async def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.gone:
            raise ActorDiedError
        actor, death = self.actor, self.death
        await asyncio.sleep(0)
        answer = asyncio.ensure_future(self._answer(getattr(actor, name), arguments))
        dying = asyncio.ensure_future(death.wait())
        await asyncio.wait({answer, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if death.is_set():
            answer.cancel()
            raise ActorUnavailableError("socket closed", None)
        await asyncio.sleep(0)  # the answer may still be lost on its way
        if death.is_set():
            raise ActorUnavailableError("socket closed", None)
        try:
            return answer.result()
        except Exception as error:
            raise RayTaskError(name, str(error), error).as_instanceof_cause() from None

    async def _answer(self, method: Any, arguments: tuple[Any, ...]) -> Any:
        result = method(*arguments)
        return await result if inspect.isawaitable(result) else result


@pytest.fixture(autouse=True, params=["by a line", "by polls", "by a line that fails"])
def without_processes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tokens come all ways that there are."""

    async def no_line(self: SchedulerActor, subscriber: str) -> str:
        self._subscribers.check(subscriber)
        return ""

    async def nobody_speaks(self: TokenEar, path: str) -> None:
        raise ConnectionRefusedError("nobody is there")

    if request.param == "by polls":
        monkeypatch.setattr(SchedulerActor, "line", no_line)
    if request.param == "by a line that fails":
        monkeypatch.setattr(TokenEar, "connect", nobody_speaks)

    async def lasting_group(*_: Any) -> StrictGroup:
        await asyncio.sleep(0)
        return StrictGroup()

    monkeypatch.setattr(scheduler_actor, "lasting_group", lasting_group)
    monkeypatch.setattr(async_cluster, "PAUSE_S", 0.001)


async def front_end(handle: Any) -> AsyncCluster:
    return AsyncCluster(handle, await handle.start.remote("model"), owner=False)


async def collect(cluster: AsyncCluster, request: Request) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    async for delta in cluster.generate(request):
        tokens += delta.tokens
    return tokens, delta


async def until_running(cluster: AsyncCluster) -> None:
    while not (await cluster.stats())["running"]:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


async def until_away(cluster: AsyncCluster) -> None:
    while cluster.away is None:  # noqa: ASYNC110
        await asyncio.sleep(0)


def requests(count: int, max_tokens: int) -> list[Request]:
    return [Request(f"r{i}", tuple(range(1, 6 + i)), max_tokens + i) for i in range(count)]


@pytest.mark.parametrize("seed", range(5))
async def test_a_scheduler_that_dies_at_random_points(seed: int) -> None:
    rnd = random.Random(seed)
    handle = Handle()
    front_ends = [await front_end(handle) for _ in range(2)]
    wanted = requests(12, 60)
    streams = asyncio.gather(*(collect(front_ends[i % 2], request) for i, request in enumerate(wanted)))
    for _ in range(15):
        for _ in range(rnd.randrange(1, 120)):
            await asyncio.sleep(0)
        if rnd.random() < 0.3:
            await handle.unsubscribe.remote(rnd.choice(front_ends).subscribed_as)
        else:
            handle.die()
            await asyncio.sleep(rnd.uniform(0, 0.02))
    for request, (tokens, last) in zip(wanted, await asyncio.wait_for(streams, 60), strict=True):
        assert (tokens, last.finish) == (expected_tokens(request), Finish.LENGTH)
    assert handle.deaths > 5
    stats = await handle.stats.remote()
    assert stats["blocks_free"] == stats["blocks_total"]
    for cluster in front_ends:
        await cluster.close()


async def test_meanwhile_it_is_said_and_requests_wait_within_a_bound() -> None:
    handle = Handle()
    cluster = await front_end(handle)
    running = asyncio.create_task(collect(cluster, requests(1, 60)[0]))
    await until_running(cluster)
    starting = asyncio.Event()
    real = SchedulerActor.start

    async def held(self: SchedulerActor, *arguments: Any) -> Any:
        await starting.wait()
        return await real(self, *arguments)

    handle.die()
    handle.actor.start = held.__get__(handle.actor)  # type: ignore[method-assign]
    await until_away(cluster)
    for asked in (cluster.health(1), cluster.stats(), cluster.metrics(), cluster.iterations(0, 1)):
        with pytest.raises(EngineUnavailable, match="died and is being started again"):
            await asked
    cluster.standing()
    queued = asyncio.create_task(collect(cluster, Request("queued", (1, 2, 3), 5)))
    await asyncio.sleep(0)
    cluster.info = type(cluster.info)(**{**vars_of(cluster.info), "most_requests": 2})
    with pytest.raises(RequestRefused, match="2 requests wait"):
        await collect(cluster, Request("one too many", (1,), 5))
    starting.set()
    assert (await running)[0] == expected_tokens(requests(1, 60)[0])
    assert (await queued)[0] == expected_tokens(Request("queued", (1, 2, 3), 5))
    await cluster.close()


def vars_of(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__slots__}


async def until_configured(cluster: AsyncCluster, policy: str) -> None:
    while cluster.info.policy != policy:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_every_front_end_hears_of_another_policy() -> None:
    handle = Handle()
    cluster, other = await front_end(handle), await front_end(handle)
    await cluster.configure("whole", 512)
    await asyncio.wait_for(until_configured(other, "whole"), 1)
    assert other.info == cluster.info
    late = await front_end(handle)
    assert late.info == cluster.info, "also who came later, and asked to have it started"
    for each in (cluster, other, late):
        await each.close()


async def test_a_policy_outlives_the_scheduler_whoever_restarts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    configurer, stale = await front_end(handle), await front_end(handle)
    before = stale.info
    await configurer.configure("whole", 512)
    stale.info = before  # it dies before this one can have heard of it
    monkeypatch.setattr(configurer, "_restarted", after(stale, configurer._restarted))
    handle.die()
    await asyncio.wait_for(until_configured(stale, "whole"), 5)
    stats = await handle.stats.remote()
    assert stats["policy"] == "whole"
    assert stats["incidents"] == ["the scheduler died and was started again"]
    for each in (configurer, stale):
        await each.close()


def after(other: AsyncCluster, call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """`call`, once the other front end has found the new scheduler, and has it started."""
    before = other.subscribed_as

    async def later() -> None:
        while other.subscribed_as == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await call()

    return later


async def test_one_that_is_gone_for_good_ends_the_streams() -> None:
    handle = Handle()
    cluster = await front_end(handle)
    running = asyncio.create_task(collect(cluster, requests(1, 60)[0]))
    await until_running(cluster)
    handle.gone = True
    handle.die()
    with pytest.raises(EngineUnavailable, match="the scheduler is gone"):
        await running
    with pytest.raises(EngineUnavailable, match="the scheduler is gone"):
        cluster.standing()
    await cluster.close()


async def test_one_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_cluster, "LOST_S", 0.2)
    handle = Handle()
    cluster = await front_end(handle)
    running = asyncio.create_task(collect(cluster, requests(1, 60)[0]))
    await until_running(cluster)
    asked = 0

    async def unavailable(*_: Any) -> None:
        nonlocal asked
        asked += 1
        raise EngineUnavailable("no rank can be had")

    monkeypatch.setattr(SchedulerActor, "start", unavailable)
    handle.die()
    with pytest.raises(EngineUnavailable, match="no rank can be had"):
        await asyncio.wait_for(running, 10)
    assert asked >= async_cluster.MOST_ATTEMPTS
    await cluster.close()


async def test_a_drain_refuses_the_new_and_lets_the_running_finish() -> None:
    """Case 19, at the engine."""
    handle = Handle()
    cluster = await front_end(handle)
    short = asyncio.create_task(collect(cluster, requests(1, 60)[0]))
    await until_running(cluster)
    draining = asyncio.create_task(cluster.drain("shutting down", 30))
    await asyncio.sleep(0.001)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await collect(cluster, Request("new", (1, 2), 5))
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await cluster.health(1)
    assert (await cluster.stats())["not_ready"] == "shutting down"
    assert (await short)[0] == expected_tokens(requests(1, 60)[0])
    await asyncio.wait_for(draining, 5)
    await cluster.close()


async def test_what_has_not_ended_in_time_ends_with_the_reason() -> None:
    handle = Handle()
    cluster = await front_end(handle)
    long = asyncio.create_task(collect(cluster, Request("long", (1, 2, 3), 90)))
    await until_running(cluster)
    await cluster.drain("shutting down", 0)
    _, last = await asyncio.wait_for(long, 5)
    assert (last.finish, last.reason) == (Finish.ERROR, "shutting down")
    await cluster.close()


class NoRay:
    """In the place of Ray, for an actor that ends itself."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(current_actor="itself")

    def kill(self, actor: str) -> None:
        self.killed.append(actor)


@pytest.mark.parametrize("detached", [True, False])
async def test_an_engine_that_nobody_wants_ends_itself_where_nobody_else_would(
    monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    no_ray = NoRay()
    monkeypatch.setattr(scheduler_actor, "ray", no_ray)
    monkeypatch.setattr(scheduler_actor, "ABANDONED_S", 0.5)
    actor = SchedulerActor(CONFIG, "name", "namespace", detached)
    await actor.start("model")
    actor.subscribe("somebody")
    await asyncio.sleep(1.6)
    assert no_ray.killed == []
    actor.unsubscribe("somebody")
    await asyncio.sleep(2.2)
    assert bool(no_ray.killed) == detached
    await actor.close()
