"""The engine on a real local Ray: transports, tensor parallelism, several groups, deaths, and the client handles."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.async_cluster import AsyncCluster
from cluster.client import Cluster
from cluster.config import EngineConfig
from cluster.engine import EngineUnavailable
from cluster.local import LocalEngine
from cluster.ray_facts import free_resources, total_resources
from scheduler.errors import RequestRefused
from scheduler.request import Delta, Finish, Request
from scheduler.sampling import SamplingParams
from tests.workers.driver import reference_tokens

pytestmark = pytest.mark.usefixtures("ray_cluster")

PROMPT = tuple((7 * i) % 500 for i in range(60))


def tiny(folder: Path, **options: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model": str(folder),
        "num_blocks": 64,
        "max_running": 8,
        "threads": 1,
        "chunk_size": 16,
    }
    return EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def running(config: EngineConfig, name: str | None = None) -> AsyncIterator[AsyncCluster]:
    cluster = await AsyncCluster.start(config, name=name)
    try:
        yield cluster
    finally:
        await cluster.close()


async def until(cluster: AsyncCluster, running: int) -> dict[str, Any]:
    """The engine's figures once so many sequences run."""
    for _ in range(1500):
        stats = await cluster.stats()
        if stats["running"] == running:
            return stats
        await asyncio.sleep(0.02)
    raise AssertionError(f"{stats['running']} sequences run, not {running}")


async def collect(engine: AsyncCluster | LocalEngine, request: Request) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    last = Delta(request.request_id)
    async for last in engine.generate(request):
        tokens += last.tokens
    return tokens, last


def greedy(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 12) -> Request:
    return Request(name, prompt, max_tokens, SamplingParams(temperature=0.0))


def seeded(name: str, seed: int) -> Request:
    return Request(name, PROMPT[seed:], 12, SamplingParams(seed=seed))


@pytest.mark.parametrize(
    ("transport", "tp"), [("compiled", 1), ("compiled", 2), ("socket", 1), ("socket", 2), ("actor", 2)]
)
async def test_the_same_tokens_as_in_one_process_and_as_transformers(
    tiny_model_dir: Path, transport: str, tp: int
) -> None:
    local = await LocalEngine.start(tiny(tiny_model_dir))
    wanted = [await collect(local, r) for r in (greedy("g"), seeded("a", 1), seeded("b", 2))]
    await local.close()
    unhurried = 3_600_000  # what is granted less than it asks for is told so by a message of its own
    async with running(tiny(tiny_model_dir, transport=transport, tp=tp, ttft_ms=unhurried)) as cluster:
        assert (cluster.info.transport, cluster.info.tp) == (transport, tp)
        got = await asyncio.gather(*(collect(cluster, r) for r in (greedy("g"), seeded("a", 1), seeded("b", 2))))
        stats = await cluster.stats()
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    assert got[0][0] == reference_tokens(tiny_model_dir, PROMPT, 12)
    assert all(last.finish is Finish.LENGTH for _, last in got)
    assert stats["blocks_free"] == stats["blocks_total"] == 64
    assert stats["messages"] <= stats["iterations"], "at most one message an iteration and subscriber"


async def test_the_real_model_on_ray(smollm2_dir: Path) -> None:
    config = EngineConfig(num_blocks=64, chunk_size=16)
    async with running(config) as cluster:
        prompt = tuple((37 * i) % 40_000 for i in range(40))
        tokens, _ = await collect(cluster, greedy("r", prompt, 8))
    assert tokens == reference_tokens(smollm2_dir, prompt, 8)


async def test_requests_are_refused_ended_and_counted(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir)) as cluster:
        with pytest.raises(RequestRefused, match="needs 125 KV blocks") as refused:
            await collect(cluster, greedy("big", (1,) * 2000, 8))
        assert refused.value.code == "kv_capacity_exceeded"
        stream = cluster.generate(greedy("left", max_tokens=900))
        assert (await anext(stream)).tokens
        with pytest.raises(RequestRefused, match="running already"):
            await anext(cluster.generate(greedy("left")))
        await stream.aclose()
        ended = asyncio.create_task(collect(cluster, greedy("aborted", max_tokens=900)))
        await asyncio.sleep(0.3)
        cluster.abort("aborted")
        cluster.abort("never heard of")
        tokens, last = await ended
        assert last.finish is Finish.ABORT
        assert len(tokens) < 900
        stats = await until(cluster, running=0)
        assert stats["blocks_free"] == stats["blocks_total"]
        await cluster.health(30)
        text = (await cluster.metrics()).decode()
        assert 'stallfree_requests_finished_total{finish="abort"' in text
        assert "stallfree_time_to_first_token_seconds_bucket" in text
        with pytest.raises(ValueError, match="unknown policy 'magic'"):
            await cluster.configure("magic", 1)
        await cluster.configure("whole", 512)
        assert (await cluster.stats())["policy"] == "whole"
        assert (await collect(cluster, greedy("after")))[1].finish is Finish.LENGTH


async def test_two_groups_share_the_work(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir, groups=2)) as cluster:
        got = await asyncio.gather(*(collect(cluster, greedy(f"r{i}", max_tokens=30)) for i in range(6)))
        stats = await cluster.stats()
    assert all(tokens == got[0][0] for tokens, _ in got)
    assert [group["iterations"] > 10 for group in stats["groups"]] == [True, True]


async def test_a_dead_scheduler_ends_its_clients_streams(tiny_model_dir: Path) -> None:
    cluster = await AsyncCluster.start(tiny(tiny_model_dir))
    stream = asyncio.create_task(collect(cluster, greedy("r", max_tokens=1500)))
    await until(cluster, running=1)
    ray.kill(cluster.scheduler)
    with pytest.raises(EngineUnavailable, match="the scheduler is gone"):
        await asyncio.wait_for(stream, 30)
    with pytest.raises(EngineUnavailable):
        await anext(cluster.generate(greedy("next")))
    await cluster.close()
    for _ in range(100):
        if free_resources().get("CPU") == total_resources()["CPU"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("what the dead scheduler had placed is still reserved")


async def test_closing_ends_every_process(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir, tp=2)) as cluster:
        pids = [pid for group in await cluster.scheduler.pids.remote() for pid in group]
        assert all(psutil.pid_exists(pid) for pid in pids)
    for _ in range(100):
        if not any(psutil.pid_exists(pid) for pid in pids):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("ranks outlive their cluster")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 4}, "degree 4 is too large: the model has 3 KV heads"),
        ({"kv_memory": "900TiB", "num_blocks": None}, "lower --kv-memory"),
        ({"tp": 40}, r"40 ranks need 20 CPU, but 8 are in the cluster; lower --tp"),
    ],
)
async def test_what_cannot_be_served_is_one_line_and_leaves_nothing(
    tiny_model_dir: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        await AsyncCluster.start(tiny(tiny_model_dir, **options))
    assert "\n" not in str(error.value)


def test_the_handle_of_a_script(tiny_model_dir: Path) -> None:
    with Cluster.start(tiny(tiny_model_dir), name="script") as cluster:
        whole = cluster.generate("Once upon a time", max_tokens=10, temperature=0.0, ignore_eos=True)
        assert len(whole.tokens) == 10
        assert whole.finish == "length"
        pieces = list(cluster.stream("Once upon a time", max_tokens=10, temperature=0.0, ignore_eos=True))
        assert "".join(pieces) == whole.text
        for _ in cluster.stream("Once upon a time", max_tokens=900, ignore_eos=True):
            break
        with pytest.raises(RequestRefused, match="temperature"):
            cluster.generate([1, 2], temperature=float("nan"))
        cluster.health()

        async def from_a_loop() -> str:
            return "".join([p async for p in cluster.agenerate([1, 2, 3], max_tokens=5, ignore_eos=True, seed=1)])

        assert asyncio.run(from_a_loop()) == cluster.generate([1, 2, 3], max_tokens=5, ignore_eos=True, seed=1).text
        while cluster.stats()["running"]:
            pass
        assert cluster.stats()["blocks_free"] == 64


def test_another_process_connects_by_address(tiny_model_dir: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from cluster.client import Cluster
        with Cluster.connect(sys.argv[1], name="shared") as cluster:
            print(cluster.generate([1, 2, 3], max_tokens=6, temperature=0.0, ignore_eos=True).tokens)
        """
    )
    with Cluster.start(tiny(tiny_model_dir), name="shared") as cluster:
        address = ray.get_runtime_context().gcs_address
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", script, address]
        other = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert other.returncode == 0, other.stderr[-2000:]
        tokens = cluster.generate([1, 2, 3], max_tokens=6, temperature=0.0, ignore_eos=True).tokens
        assert other.stdout.strip().splitlines()[-1] == str(tokens)
        assert cluster.stats()["running"] == 0


async def test_ranks_hold_their_own_on_a_busy_machine(tiny_model_dir: Path) -> None:
    """Their threads do not turn for ever, and no other process has precedence over them."""
    async with running(tiny(tiny_model_dir)) as cluster:
        [[pid]] = await cluster.scheduler.pids.remote()
        rank = psutil.Process(pid)
        assert 0 < int(rank.environ()["GOMP_SPINCOUNT"]) <= 10_000
        assert rank.nice() == psutil.Process().nice()
