"""Case 26 as a client and an operator meet it: `stallfree serve`, one of its processes killed while streams run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_cli import Server, descendants, temporary
from tests.deploy.wire import error_of, events, finishes, text_of

__all__ = ["temporary"]  # the fixture

BODY = {"model": "smollm2", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 60}


def pid_of(server: Server, actor: str) -> int:
    """The one process of the server's that runs this actor."""
    (pid,) = [pid for pid, command in descendants(server.mark).items() if f"ray::{actor}" in command]
    return pid


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Event | None = None) -> str:
    text = ""
    body = {**BODY, "prompt": f"{number} little birds"}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            text += piece
            if begun is not None:
                begun.set()
    assert finishes(events(text)) == ["length"]
    return text_of(events(text))


async def all_of(client: httpx.AsyncClient, begun: asyncio.Event | None = None) -> list[str]:
    return await asyncio.gather(*(read(client, number, begun) for number in range(4)))


async def until_healthy(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 - that is all there is to ask
        await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("actor", "words"),
    [("RankActor", "the worker group: rank 0 (pid {pid}) died"), ("SchedulerActor", "the scheduler died")],
)
async def test_streams_go_on_health_says_so_and_the_cause_is_told_once(
    smollm2_dir: Path, temporary: Path, actor: str, words: str
) -> None:
    arguments = ("--json", "--port", "0", "--policy", "chunked", "--profile-seconds", "0")
    with Server(*arguments) as server:
        url = (await asyncio.to_thread(server.ready))["url"]
        async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as client:
            undisturbed = await all_of(client)
            begun = asyncio.Event()
            streams = asyncio.create_task(all_of(client, begun))
            await begun.wait()
            pid = pid_of(server, actor)
            os.kill(pid, signal.SIGKILL)
            while (health := await client.get("/health")).status_code == 200:
                pass
            error_of(health, 503)
            error_of(await client.get("/ready"), 503)
            assert await streams == undisturbed
            await until_healthy(client)
            assert (await client.get("/ready")).status_code == 200
            await asyncio.sleep(5)  # what happened is told every few seconds
        await asyncio.to_thread(server.stop, signal.SIGTERM)
        assert server.process.returncode == 0
        assert server.process.stderr is not None
        lines = server.process.stderr.read().splitlines()
        told = [line for line in lines if "died" in line and "(raylet)" not in line]  # Ray adds a line of its own
        assert len(told) == 1, told
        assert told[0].startswith(words.format(pid=pid))
        assert descendants(server.mark) == {}
