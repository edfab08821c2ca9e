"""Separated groups in one process: the loops, handoffs and transfers of the cluster over workers called directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayError
from torch import Tensor

from cluster import kv_carrier
from cluster.assembly import Common, engine_info, make_scheduler, worker_config
from cluster.config import EngineConfig
from cluster.loop import IterationLoop
from cluster.mailbox import Mailboxes
from cluster.recovery import WorkersLost
from cluster.roles import group_kinds
from cluster.separation import SeparatedGroup, Separation
from cluster.transfers import Transfers
from scheduler.plan import IterationPlan, IterationResult
from scheduler.request import Delta, Finish, Request
from scheduler.sampling import SamplingParams
from tests.workers.driver import reference_tokens
from workers.config import WorkerDescription
from workers.kv_link import Header, Link, LinkError
from workers.worker import Worker

LONG = tuple(2 + (7 * i) % 500 for i in range(150))  # without the pad token, which transformers leaves out


class Call:
    """A rank's method, called on a thread."""

    def __init__(self, rank: Rank, method: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self._rank, self._method, self._threads = rank, method, threads

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._called(arguments))

    async def _called(self, arguments: tuple[Any, ...]) -> Any:
        if self._rank.dead:
            raise RayError("the rank is dead")
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._method, *arguments)
        if self._rank.dead:
            raise RayError("the rank died")
        return answer


class Rank:
    """As the actor of a rank, as far as KV is concerned."""

    def __init__(self, worker: Worker) -> None:
        self.dead = False
        transfer, ordered = worker.transfer, ThreadPoolExecutor(1)
        self.kv_where = Call(self, lambda: ("here", "127.0.0.1"), ordered)
        self.kv_take_from = Call(self, transfer.take_from, ordered)
        self.kv_connect = Call(self, transfer.connect, ThreadPoolExecutor(1))
        self.kv_open = Call(self, transfer.open, ordered)
        self.kv_send = Call(self, transfer.send, ordered)
        self.kv_close = Call(self, transfer.close, ordered)
        self.kv_reports = Call(self, lambda timeout_s: transfer.reports(0.2), ThreadPoolExecutor(1))


class Group:
    """A lasting group of one rank: an executor, its recovery, and what the carrier needs of it."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._thread = ThreadPoolExecutor(1)
        self._wake: Callable[[], None] = lambda: None
        self.rebuilt = 0
        self.allowed = asyncio.Event()
        self.allowed.set()
        self._build()

    def _build(self) -> None:
        self.worker = Worker(worker_config(self._config, str(self._folder)))
        self.descriptions: list[WorkerDescription] = [self.worker.load()]
        self.worker.allocate(self._config.num_blocks or 64)
        self.ranks: list[Any] = [Rank(self.worker)]

    async def execute(self, plan: IterationPlan) -> IterationResult:
        rank = self.ranks[0]
        result = await asyncio.get_running_loop().run_in_executor(self._thread, self.worker.execute, plan)
        if rank.dead:
            raise WorkersLost("rank 0 died")
        return result

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        self.ranks[0].dead = True
        self._wake()

    def patience(self, predicted_s: float | None) -> float:
        return 60.0

    def watch(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def dead(self) -> WorkersLost | None:
        return WorkersLost("rank 0 died") if self.ranks[0].dead else None

    async def replace(self, lost: WorkersLost) -> Group:
        await self.allowed.wait()
        self._build()
        self.rebuilt += 1
        return self


class Engine:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        kinds = group_kinds(config)
        self.groups = [Group(kind.config, folder) for kind in kinds]
        pools = [config.num_blocks or 64] * len(kinds)
        info = engine_info(config, str(folder), self.groups[0].descriptions, pools, "in-process")
        common = Common()
        self.mailboxes, self.registry = Mailboxes(), CollectorRegistry()
        self.separation: Separation | None = None
        self.loops = []
        for index, (kind, group) in enumerate(zip(kinds, self.groups, strict=True)):
            lasting: Any = SeparatedGroup(group, index, lambda: self.separation)  # type: ignore[arg-type]
            scheduler = make_scheduler(kind.config, info, role=kind.role, common=common)
            self.loops.append(
                IterationLoop(
                    scheduler,
                    lasting,
                    clock=time.monotonic,
                    publish=self.mailboxes.deliver,
                    recovery=lasting,
                    on_step=self._pump,
                    overlap=config.overlap,
                )
            )
        self.transfers = Transfers(self.registry, {"model_name": "m"})
        self.separation = Separation(self.loops, self.groups, time.monotonic, self.transfers)

    def _pump(self) -> None:
        if self.separation is not None:
            self.separation.pump()

    async def collect(self, request: Request) -> tuple[list[int], Delta]:
        tokens: list[int] = []
        self.mailboxes.open(request.request_id)
        self.loops[0].add(request)
        last = Delta(request.request_id)
        async for last in self.mailboxes.read(request.request_id, lambda _: None):
            tokens += last.tokens
        return tokens, last

    async def when(self, holds: Callable[[], bool]) -> None:
        for _ in range(3000):
            if holds():
                return
            await asyncio.sleep(0.002)
        raise AssertionError("never came")

    @property
    def all_free(self) -> bool:
        for loop in self.loops:
            loop.scheduler.check()
        pools = [loop.scheduler.pool for loop in self.loops]
        return all(pool.available == pool.total for pool in pools)


@asynccontextmanager
async def engine(folder: Path, **options: Any) -> AsyncIterator[Engine]:
    defaults = {"mode": "separated", "policy": "chunked", "chunk_size": 16, "num_blocks": 64, "max_running": 8}
    made = Engine(EngineConfig(model=str(folder), threads=1, **{**defaults, **options}), folder)
    tasks = [asyncio.create_task(loop.run()) for loop in made.loops]
    assert made.separation is not None
    await made.separation.link_all()
    try:
        yield made
        await made.when(lambda: made.all_free)
        assert not any(loop.failure for loop in made.loops)
    finally:
        for loop in made.loops:
            loop.close()
        made.separation.close()
        await asyncio.gather(*tasks)


def request(name: str, *, prompt: tuple[int, ...] = LONG, max_tokens: int = 20, seed: int | None = None) -> Request:
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed, presence_penalty=0.5)
    return Request(name, prompt, max_tokens, sampling)


def turned(count: int) -> tuple[int, ...]:
    return LONG[count:] + LONG[:count]


@pytest.mark.parametrize("overlap", [1, 2])
async def test_tokens_and_figures(tiny_model_dir: Path, overlap: int) -> None:
    async with engine(tiny_model_dir, overlap=overlap, num_blocks=80) as e:
        got = await asyncio.gather(*(e.collect(request(f"r{i}", prompt=turned(i))) for i in range(4)))
        for i, (tokens, last) in enumerate(got):
            assert tokens == reference_tokens(tiny_model_dir, turned(i), 20)
            assert last.finish is Finish.LENGTH
        again, _ = await e.collect(request("again", prompt=turned(1)))
        assert again == got[1][0]
        latest = {entry["request"]: entry for entry in e.transfers.take_latest()}
        assert latest["r0"]["blocks_sent"] == 10
        assert latest["r0"]["bytes"] == 10 * 16 * 3 * 2 * 3 * 8 * 4
        assert 0 < latest["r0"]["early_bytes"] < latest["r0"]["bytes"]
        assert latest["again"]["blocks_shared"] == 9
        assert e.transfers.figures()["requests"] == 5
        assert b"stallfree_kv_transfer_bytes_total" in generate_latest(e.registry)


async def test_aborts_at_any_moment(tiny_model_dir: Path) -> None:
    async with engine(tiny_model_dir) as e:
        assert e.separation is not None
        for turn in range(12):
            stream = asyncio.create_task(e.collect(request(f"r{turn}", prompt=turned(turn), max_tokens=60)))
            await asyncio.sleep(0.004 * turn)
            e.separation.abort(f"r{turn}", Finish.ABORT)
            _, last = await asyncio.wait_for(stream, 20)
            assert last.finish is Finish.ABORT
            await e.when(lambda: e.all_free)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_lost_group_loses_no_request(tiny_model_dir: Path, victim: int) -> None:
    async with engine(tiny_model_dir, decode_groups=2, num_blocks=100) as e:
        prompts = [turned(i) for i in range(5)]
        streams = [
            asyncio.create_task(e.collect(request(f"r{i}", prompt=prompt, max_tokens=30)))
            for i, prompt in enumerate(prompts)
        ]
        await e.when(lambda: bool(e.loops[1].scheduler.exchange.arriving) and e.loops[2].scheduler.idle is False)
        e.groups[victim].allowed.clear()
        e.groups[victim].kill()
        await e.when(lambda: e.loops[victim].lost is not None)
        await asyncio.sleep(0.05)
        e.groups[victim].allowed.set()
        got = await asyncio.wait_for(asyncio.gather(*streams), 60)
        for prompt, (tokens, last) in zip(prompts, got, strict=True):
            assert tokens == reference_tokens(tiny_model_dir, prompt, 30)
            assert last.finish is Finish.LENGTH
        await e.when(lambda: e.groups[victim].rebuilt == 1)


async def test_one_that_hangs_while_it_is_idle_is_noticed_by_what_it_does_not_answer(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before anybody would stop waiting for the answer."""
    monkeypatch.setattr(kv_carrier, "LOOK_AFTER_S", 0.05)
    async with engine(tiny_model_dir) as e:
        hung = e.groups[1]
        before, execute = hung.ranks, hung.execute

        async def never() -> None:
            await asyncio.Event().wait()

        async def execute_or_hang(plan: IterationPlan) -> IterationResult:
            if hung.ranks is before:
                await never()
            return await execute(plan)

        monkeypatch.setattr(before[0].kv_open, "remote", lambda *_: asyncio.ensure_future(never()))
        monkeypatch.setattr(hung, "execute", execute_or_hang)
        monkeypatch.setattr(hung, "patience", lambda _: 0.1)
        tokens, _ = await asyncio.wait_for(e.collect(request("r")), 20)
        assert tokens == reference_tokens(tiny_model_dir, LONG, 20)
        assert hung.rebuilt == 1


async def test_little_room_to_decode(tiny_model_dir: Path) -> None:
    async with engine(tiny_model_dir, num_blocks=24, max_running=3) as e:
        streams = [asyncio.create_task(e.collect(request(f"r{i}", prompt=turned(i), max_tokens=40))) for i in range(6)]
        await e.when(lambda: bool(e.loops[0].scheduler.exchange.held))
        await asyncio.wait_for(e.loops[0].heartbeat(), 20)
        for i, (tokens, _) in enumerate(await asyncio.wait_for(asyncio.gather(*streams), 60)):
            assert tokens == reference_tokens(tiny_model_dir, turned(i), 40)


@pytest.mark.parametrize("breaks", [1, 1000])
async def test_a_link_that_breaks_is_made_again(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    """And where it always does, its request alone ends, with the reason."""
    send, left = Link.send, [breaks]

    def fragile(link: Link, header: Header, content: Tensor) -> bool:
        if left[0] > 0:
            left[0] -= 1
            raise LinkError("cable cut")
        return send(link, header, content)

    monkeypatch.setattr(Link, "send", fragile)
    async with engine(tiny_model_dir) as e:
        tokens, last = await asyncio.wait_for(e.collect(request("r")), 30)
        if breaks == 1:
            assert tokens == reference_tokens(tiny_model_dir, LONG, 20)
        else:
            assert last.finish is Finish.ERROR
            assert "cable cut" in (last.reason or "")
            left[0] = 0
            assert (await e.collect(request("next")))[0] == reference_tokens(tiny_model_dir, LONG, 20)
        one, _ = await e.collect(request("one", max_tokens=1))
        assert one == reference_tokens(tiny_model_dir, LONG, 20)[:1]
