"""Case 26 on a real local Ray: ranks that are killed or stopped while streams run. Each stream gets the tokens that it
got when nothing was wrong, none lost and none twice; processes are ended by the ids that the engine itself gives."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.async_cluster import AsyncCluster
from cluster.engine import EngineUnavailable
from cluster.scheduler_actor import SchedulerActor
from cluster.socket_transport import SocketTransport
from cluster.transport import ASKED_WHY_S, CompiledTransport
from scheduler.request import Delta, Finish, Request
from scheduler.sampling import SamplingParams
from tests.cluster.test_ray import collect, greedy, running, tiny, until

pytestmark = pytest.mark.usefixtures("ray_cluster")


def wanted(count: int, max_tokens: int) -> list[Request]:
    """Prompts of several lengths, greedy and seeded. Among few tokens: a draw from the whole flat distribution of a
    random model falls on a boundary every ten thousand times, where rounding decides, which another batch changes.
    """
    return [
        Request(
            f"r{i}",
            tuple((7 * j + i) % 500 for j in range(5 + 9 * i)),
            max_tokens,
            SamplingParams(temperature=i % 2, seed=i, top_k=4),
        )
        for i in range(count)
    ]


@dataclass
class Seen:
    """Tokens of all streams so far."""

    count: int = 0

    async def reach(self, count: float) -> None:
        while self.count < count:  # noqa: ASYNC110 - the streams' tokens are counted as they come
            await asyncio.sleep(0.005)


async def all_tokens(
    cluster: AsyncCluster, requests: list[Request], suffix: str, seen: Seen | None = None
) -> list[list[int]]:
    """Tokens by request, each of which has to end as it should."""
    seen = seen or Seen()

    async def counted(request: Request) -> tuple[list[int], Delta]:
        tokens: list[int] = []
        async for delta in cluster.generate(replace(request, request_id=request.request_id + suffix)):
            tokens += delta.tokens
            seen.count += len(delta.tokens)
        return tokens, delta

    got = await asyncio.gather(*map(counted, requests))
    assert [last.finish for _, last in got] == [Finish.LENGTH] * len(requests), [last.reason for _, last in got]
    return [tokens for tokens, _ in got]


async def ranks(cluster: AsyncCluster, group: int = 0) -> list[int]:
    pids: list[list[int]] = await cluster.scheduler.pids.remote()
    return pids[group]


async def lost(cluster: AsyncCluster, losses: int = 1) -> dict[str, Any]:
    """The engine's figures once it knows of so many losses."""
    while (stats := await cluster.stats())["worker_losses"] < losses:  # noqa: ASYNC110 - Ray has no event for it
        await asyncio.sleep(0.02)
    return stats


async def rebuilt(cluster: AsyncCluster) -> None:
    while (await cluster.stats())["rebuilding"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("transport", "tp"),
    [
        ("compiled", 2),
        ("socket", 1),
        pytest.param("socket", 2, marks=pytest.mark.slow),
        pytest.param("actor", 1, marks=pytest.mark.slow),
        pytest.param("actor", 2, marks=pytest.mark.slow),
    ],
)
async def test_a_killed_rank_is_replaced_and_streams_go_on(tiny_model_dir: Path, transport: str, tp: int) -> None:
    requests = wanted(6, 100)
    async with running(tiny(tiny_model_dir, tp=tp, transport=transport)) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again"))
        await until(cluster, running=6)
        before = await ranks(cluster)
        os.kill(before[-1], signal.SIGKILL)
        stats = await lost(cluster)
        assert stats["rebuilding"] == [f"rank {tp - 1} (pid {before[-1]}) died"]
        with pytest.raises(EngineUnavailable, match=rf"rank {tp - 1} \(pid \d+\) died"):
            await cluster.health(60)
        queued, _ = await collect(cluster, replace(requests[0], request_id="queued"))
        assert await streams == undisturbed
        assert queued == undisturbed[0]
        await cluster.health(60)
        after, stats = await ranks(cluster), await cluster.stats()
        assert not set(before) & set(after), "all ranks are fresh"
        assert not any(psutil.pid_exists(pid) for pid in before)
        assert stats["worker_losses"] == 1
        assert [line for line in stats["incidents"] if "died" in line] == [
            f"the worker group: rank {tp - 1} (pid {before[-1]}) died; rebuilding it"
        ]
        assert stats["blocks_free"] == stats["blocks_total"]


@pytest.mark.parametrize(
    ("transport", "tp", "overlap"),
    [
        ("socket", 1, 1),
        pytest.param("actor", 1, 1, marks=pytest.mark.slow),
        pytest.param("compiled", 2, 2, marks=pytest.mark.slow),
    ],
)
async def test_a_hung_rank_is_noticed_and_replaced(tiny_model_dir: Path, transport: str, tp: int, overlap: int) -> None:
    requests = wanted(4, 100)
    config = tiny(tiny_model_dir, tp=tp, transport=transport, overlap=overlap, hang_seconds=1)
    async with running(config) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again"))
        await until(cluster, running=4)
        before = await ranks(cluster)
        os.kill(before[-1], signal.SIGSTOP)
        await lost(cluster)
        assert await streams == undisturbed
        assert not any(psutil.pid_exists(pid) for pid in before), "a stopped process is ended as well"
        stats = await cluster.stats()
        assert f"rank {tp - 1} (pid {before[-1]}) hung: no answer within" in stats["incidents"][0]


def destroy_channel(actor: SchedulerActor, which: str) -> None:
    """In the scheduler's process: the shared memory of a compiled graph is no channel any more, to whoever uses it."""
    transport = actor._groups[0]._group._transport
    assert isinstance(transport, CompiledTransport)
    channels = transport._graph.dag_input_channels if which == "input" else transport._graph.dag_output_channels
    for channel in channels:
        channel.close()


async def longest_answer(cluster: AsyncCluster, until_losses: int) -> float:
    """Seconds that the scheduler took at the most to answer, until it knows of so many losses."""
    longest, clock = 0.0, asyncio.get_running_loop().time
    while True:
        asked = clock()
        stats = await cluster.stats()
        longest = max(longest, clock() - asked)
        if stats["worker_losses"] >= until_losses:
            return longest
        await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["input", "output"])
async def test_a_destroyed_channel_of_a_compiled_graph_is_replaced(tiny_model_dir: Path, which: str) -> None:
    requests = wanted(6, 100)
    async with running(tiny(tiny_model_dir, tp=2, transport="compiled")) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again"))
        await until(cluster, running=6)
        before = await ranks(cluster)
        await cluster.scheduler.__ray_call__.remote(destroy_channel, which)
        longest = await longest_answer(cluster, until_losses=1)
        assert await streams == undisturbed
        assert longest < ASKED_WHY_S / 2, "the scheduler answers while the ranks are asked why"
        await cluster.health(60)
        stats = await cluster.stats()
        assert not set(before) & set(await ranks(cluster)), "all ranks are fresh"
        assert not any(psutil.pid_exists(pid) for pid in before)
        assert stats["worker_losses"] == 1
        causes = [line for line in stats["incidents"] if "rebuilding it" in line]
        assert len(causes) == 1
        assert "hannel" in causes[0], causes
        assert stats["blocks_free"] == stats["blocks_total"]


def hang_up(actor: SchedulerActor) -> None:
    transport = actor._groups[0]._group._transport
    assert isinstance(transport, SocketTransport)
    transport._lines[-1].close()


async def test_a_rank_that_hangs_up_is_replaced(tiny_model_dir: Path) -> None:
    requests = wanted(6, 100)
    async with running(tiny(tiny_model_dir, tp=2)) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again"))
        await until(cluster, running=6)
        before = await ranks(cluster)
        await cluster.scheduler.__ray_call__.remote(hang_up)
        assert await streams == undisturbed
        await cluster.health(60)
        stats = await cluster.stats()
        assert not set(before) & set(await ranks(cluster)), "all ranks are fresh"
        assert stats["worker_losses"] == 1
        assert re.search(r"a rank failed: .*(has left its socket|Broken pipe); rebuilding it", stats["incidents"][0])


@pytest.mark.slow
async def test_a_rank_that_dies_while_idle_is_replaced_at_once(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir)) as cluster:
        undisturbed, _ = await collect(cluster, greedy("before"))
        os.kill((await ranks(cluster))[0], signal.SIGKILL)
        await lost(cluster)
        await rebuilt(cluster)
        await cluster.health(60)
        assert (await collect(cluster, greedy("after")))[0] == undisturbed


@pytest.mark.slow
async def test_the_other_group_goes_on(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir, groups=2)) as cluster:
        undisturbed, _ = await collect(cluster, greedy("before"))
        os.kill((await ranks(cluster, group=1))[0], signal.SIGKILL)
        stats = await lost(cluster)
        seen = stats["groups"][0]["iterations"]
        assert (await collect(cluster, greedy("meanwhile")))[0] == undisturbed
        stats = await cluster.stats()
        assert stats["groups"][0]["iterations"] > seen
        await rebuilt(cluster)
        await cluster.health(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["compiled", "socket", "actor"])
async def test_ten_kills_in_a_row_at_random_points(tiny_model_dir: Path, transport: str) -> None:
    rnd = random.Random(11)
    requests = wanted(32, 110)
    config = tiny(
        tiny_model_dir, tp=2, transport=transport, policy="chunked", chunk_size=512, max_running=32, num_blocks=2500
    )
    async with running(config) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        seen = Seen()
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again", seen))
        for kill in range(10):
            await seen.reach(32 * 110 * (kill + rnd.random()) / 10.5)
            pids = await ranks(cluster)
            os.kill(rnd.choice(pids), signal.SIGKILL)
            await lost(cluster, kill + 1)
            await rebuilt(cluster)
        assert not streams.done(), "the last kill has to hit running streams"
        assert await streams == undisturbed
        stats = await cluster.stats()
        assert stats["worker_losses"] == 10
        assert stats["blocks_free"] == stats["blocks_total"]
