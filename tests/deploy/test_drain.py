"""Case 19: a server that is asked to end takes nothing new, lets running streams finish, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from tests.deploy.test_cli import Server, descendants, shared_memory, temporary
from tests.deploy.wire import JsonObject, error_of, events, finishes

__all__ = ["temporary"]  # the fixture

BODY = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "ignore_eos": True, "stream": True}
DRAIN_S = 4


async def test_sigterm_drains(smollm2_dir: Path, temporary: Path) -> None:
    arguments = ("--json", "--port", "0", "--drain-seconds", str(DRAIN_S), "--profile-seconds", "0")
    with Server(*arguments, "--policy", "chunked") as server:
        url = (await asyncio.to_thread(server.ready))["url"]
        pids = set(descendants(server.mark))
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 200
            begun = asyncio.Event(), asyncio.Event()
            short = asyncio.create_task(read(client, 20, begun[0]))
            long = asyncio.create_task(read(client, 900, begun[1]))
            await asyncio.gather(*(one.wait() for one in begun))
            server.process.send_signal(signal.SIGTERM)
            refused = await first_refusal(client)
            assert "shutting down" in error_of(refused, 503)["message"]
            assert int(refused.headers["Retry-After"]) >= 1
            for path in ("/health", "/ready"):
                assert "shutting down" in error_of(await client.get(path), 503)["message"]
            assert finishes(await short) == ["length"]
            *_, last = await long
            assert "shutting down" in last["error"]["message"]
            assert finishes((await long)[:-1]) == []
        assert server.process.wait(60) == 0
        assert descendants(server.mark) == {}
        assert shared_memory(pids) == []
    assert [name for name in os.listdir(temporary) if name.startswith("stallfree-")] == []


async def read(client: httpx.AsyncClient, max_tokens: int, begun: asyncio.Event) -> list[JsonObject]:
    """All events of a stream. `begun` is set when the first has come."""
    text = ""
    async with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": max_tokens}) as response:
        async for piece in response.aiter_text():
            text += piece
            begun.set()
    return events(text)


async def first_refusal(client: httpx.AsyncClient) -> httpx.Response:
    """Of a new request, once the signal has arrived: until then they are served."""
    while True:
        answer = await client.post("/v1/completions", json={**BODY, "stream": False, "max_tokens": 1})
        if answer.status_code != 200:
            return answer
