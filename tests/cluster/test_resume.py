"""A scheduler that dies, on a real local Ray: its front ends give it their requests again, and streams only pause."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray.exceptions import RayError

from cluster.async_cluster import AsyncCluster
from cluster.engine import EngineUnavailable
from cluster.scheduler_actor import SchedulerActor
from scheduler.request import Finish
from tests.cluster.test_ray import collect, greedy, running, tiny, until
from tests.cluster.test_rebuild import Seen, all_tokens, wanted

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def kill(cluster: AsyncCluster) -> int:
    """End the scheduler's process; by Ray's means it would not be started again."""
    pid: int = await cluster.scheduler.pid.remote()
    os.kill(pid, signal.SIGKILL)
    return pid


async def healthy_until_not(cluster: AsyncCluster) -> None:
    while True:
        await cluster.health(60)


async def silence(cluster: AsyncCluster) -> None:
    """As if its process had died: nobody polls any more, and nobody says so."""
    cluster._task.cancel()
    await asyncio.gather(cluster._task, return_exceptions=True)


async def restarted(cluster: AsyncCluster, dead: int) -> None:
    """Once another process of it serves."""
    while True:
        try:
            await cluster.health(60)
            if await cluster.scheduler.pid.remote() != dead:
                return
        except EngineUnavailable:
            pass
        await asyncio.sleep(0.05)


async def test_a_killed_scheduler_is_restarted_and_streams_of_all_front_ends_go_on(tiny_model_dir: Path) -> None:
    requests = wanted(6, 200)
    async with running(tiny(tiny_model_dir, policy="chunked", num_blocks=256), name="mortal") as cluster:
        other = await AsyncCluster.connect("mortal")
        await cluster.configure("whole", 512)
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.gather(all_tokens(cluster, requests[:3], "-again"), all_tokens(other, requests[3:], "-again"))
        aborted = asyncio.create_task(collect(cluster, greedy("aborted", max_tokens=1500)))
        await until(cluster, running=7)
        ((rank,),) = await cluster.scheduler.pids.remote()
        dead = await kill(cluster)
        with pytest.raises(EngineUnavailable, match="died and is being started again"):
            await healthy_until_not(cluster)
        cluster.abort("aborted")
        queued = asyncio.create_task(collect(other, replace(requests[0], request_id="queued")))
        first, second = await streams
        assert first + second == undisturbed
        assert (await queued)[0] == undisturbed[0]
        assert (await aborted)[1].finish is Finish.ABORT
        await restarted(cluster, dead)
        stats = await until(cluster, running=0)
        assert stats["blocks_free"] == stats["blocks_total"] == 256
        assert stats["policy"] == "whole", "what was configured stays so"
        assert stats["incidents"] == ["the scheduler died and was started again"]
        assert not psutil.pid_exists(rank), "a rank outlives its scheduler"
        pid: int = await cluster.scheduler.pid.remote()
        assert not any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps()), "it starts at once"
        await other.close()


@pytest.mark.slow
async def test_a_front_end_that_was_taken_for_dead_goes_on(tiny_model_dir: Path) -> None:
    requests = wanted(4, 200)
    async with running(tiny(tiny_model_dir)) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again"))
        for _ in range(3):
            await until(cluster, running=4)
            await cluster.scheduler.unsubscribe.remote(cluster.subscribed_as)
        assert await streams == undisturbed


def break_lines(actor: SchedulerActor) -> None:
    actor._subscribers.hang_up()


async def test_streams_go_on_after_a_broken_line(tiny_model_dir: Path) -> None:
    requests = wanted(4, 200)
    async with running(tiny(tiny_model_dir)) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        seen = Seen()
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again", seen))
        for broken in range(3):
            await seen.reach(4 * 50 * (broken + 1))
            at_scheduler = broken % 2 == 0
            if at_scheduler:
                await cluster.scheduler.__ray_call__.remote(break_lines)
            else:
                assert cluster._ear is not None, "both are on one machine"
                cluster._ear._end.close()
        assert await streams == undisturbed
        stats = await until(cluster, running=0)
        assert stats["blocks_free"] == stats["blocks_total"]
        assert stats["incidents"] == []


@pytest.mark.slow
async def test_a_front_end_that_is_gone_has_its_requests_ended(tiny_model_dir: Path) -> None:
    async with running(tiny(tiny_model_dir), name="left") as cluster:
        other = await AsyncCluster.connect("left")
        stream = asyncio.create_task(collect(other, greedy("r", max_tokens=1900)))
        await until(cluster, running=1)
        await silence(other)
        stats = await until(cluster, running=0)
        assert stats["blocks_free"] == stats["blocks_total"]
        stream.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["compiled", "socket", "actor"])
async def test_a_scheduler_killed_again_and_again(tiny_model_dir: Path, transport: str) -> None:
    """It is also the end of the compiled graph's channels that it drives."""
    rnd = random.Random(5)
    requests = wanted(16, 100)
    config = tiny(
        tiny_model_dir, tp=2, transport=transport, policy="chunked", chunk_size=512, max_running=16, num_blocks=1200
    )
    async with running(config) as cluster:
        undisturbed = await all_tokens(cluster, requests, "")
        seen = Seen()
        streams = asyncio.create_task(all_tokens(cluster, requests, "-again", seen))
        for number in range(4):
            await seen.reach(16 * 100 * (number + rnd.random()) / 4.5)
            await restarted(cluster, await kill(cluster))
        assert not streams.done(), "the last kill has to hit running streams"
        assert await streams == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["compiled", "socket", "actor"])
async def test_ten_kills_of_random_processes_at_random_points(tiny_model_dir: Path, transport: str) -> None:
    """Ranks that are killed, ranks that are stopped, and the scheduler; two front ends have 16 streams each."""
    rnd = random.Random(3)
    requests = wanted(32, 110)
    config = tiny(
        tiny_model_dir, tp=2, transport=transport, policy="chunked", chunk_size=512, max_running=32, num_blocks=2500,
        hang_seconds=1,
    )  # fmt: skip
    async with running(config, name=f"random-{transport}") as cluster:
        other = await AsyncCluster.connect(f"random-{transport}")
        undisturbed = await all_tokens(cluster, requests, "")
        seen = Seen()
        streams = asyncio.gather(
            all_tokens(cluster, requests[::2], "-again", seen), all_tokens(other, requests[1::2], "-again", seen)
        )
        ends: list[str] = []
        for number in range(10):
            await seen.reach(32 * 110 * (number + rnd.random()) / 10.5)
            ends.append(rnd.choice(("rank killed", "rank stopped", "scheduler killed")))
            await end_one(cluster, ends[-1], rnd)
        assert len(set(ends)) == 3
        assert not streams.done(), "the last kill has to hit running streams"
        even, odd = await streams
        assert even == undisturbed[::2]
        assert odd == undisturbed[1::2]
        stats = await until(cluster, running=0)
        assert stats["blocks_free"] == stats["blocks_total"]
        await other.close()


async def end_one(cluster: AsyncCluster, how: str, rnd: random.Random) -> None:
    """Once its predecessor's end has been recovered from, so far that there are processes to choose from."""
    if how == "scheduler killed":
        await restarted(cluster, await kill(cluster))
        return
    os.kill(rnd.choice(await answering_ranks(cluster)), signal.SIGKILL if how == "rank killed" else signal.SIGSTOP)


async def answering_ranks(cluster: AsyncCluster) -> list[int]:
    while True:
        with suppress(RayError):
            (pids,) = await cluster.scheduler.pids.remote()
            return list(pids)
        await asyncio.sleep(0.1)
