"""Replicas of the Serve application that die, on a real local Ray: an API replica, and the one that owns the engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from deploy.app import NAMESPACE, build_app
from tests.deploy.wire import events, finishes, text_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

APPLICATION = "replicas-die"
BODY = {"model": "tiny", "prompt": [7] * 20, "temperature": 0, "ignore_eos": True, "stream": True}
TOKENS = 600


@pytest.fixture
def url(ray_cluster: None, tiny_model_dir: Path) -> Iterator[str]:
    from deploy.ports import check_port

    port = check_port("127.0.0.1", 0)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    arguments = {
        "model": str(tiny_model_dir), "served_model_name": "tiny", "policy": "chunked", "num_blocks": "600",
        "profile_seconds": "0", "threads": "1", "replicas": "2",
    }  # fmt: skip
    serve.run(build_app(arguments), name=APPLICATION, route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [actor for actor in named if actor["namespace"] == NAMESPACE] == [], "the engine outlives its application"


def replicas(deployment: str) -> list[int]:
    """Process ids of a deployment's replicas, by the names that Serve gives their processes."""
    title = f"ServeReplica:{APPLICATION}:{deployment}"
    here = psutil.Process().children(recursive=True)
    return [process.pid for process in here if process.cmdline() and title in process.cmdline()[0]]


async def scheduler() -> Any:
    name, namespace = await serve.get_deployment_handle("Engine", APPLICATION).scheduler.remote()
    return ray.get_actor(name, namespace=namespace)


async def read(client: httpx.AsyncClient) -> str:
    """The text of a whole stream, empty where the connection is lost."""
    text = ""
    try:
        async with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": TOKENS}) as response:
            async for piece in response.aiter_text():
                text += piece
        streamed = events(text)
    except (httpx.HTTPError, AssertionError):
        return ""
    return text_of(streamed) if finishes(streamed) == ["length"] else ""


async def until_running(engine: Any, true: Callable[[int], bool]) -> None:
    while not true((await engine.stats.remote())["running"]):  # noqa: ASYNC110 - Ray has no event for it
        await asyncio.sleep(0.02)


async def replaced(deployment: str, dead: int, count: int) -> None:
    while dead in (now := replicas(deployment)) or len(now) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_replica_that_dies_leaves_the_others_alone(url: str) -> None:
    """One API replica is killed, then the one that started the engine: streams of the others go on, Serve starts new
    ones that find the same engine, and what the dead one had asked for is ended."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        undisturbed = await read(client)
        assert undisturbed
        engine = await scheduler()
        ranks = await engine.pids.remote()
        first, second = replicas("Api")
        streams = [asyncio.create_task(read(client)) for _ in range(8)]
        await until_running(engine, lambda count: count == 8)
        os.kill(first, signal.SIGKILL)
        got = await asyncio.gather(*streams)
        assert set(got) == {undisturbed, ""}, "streams of the replica that lives go on, those of the other are lost"
        await until_running(engine, lambda count: count == 0)
        await replaced("Api", first, 2)
        (owner,) = replicas("Engine")
        streams = [asyncio.create_task(read(client)) for _ in range(4)]
        await until_running(engine, lambda count: count == 4)
        os.kill(owner, signal.SIGKILL)
        assert set(await asyncio.gather(*streams)) == {undisturbed}
        await replaced("Engine", owner, 1)
        assert await (await scheduler()).pids.remote() == ranks, "the engine is still the same"
        stats = await engine.stats.remote()
        assert stats["blocks_free"] == stats["blocks_total"]
        assert second in replicas("Api")
