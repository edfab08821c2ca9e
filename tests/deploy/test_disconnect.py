"""Case 17: a client that goes away takes its request with it, over a real connection to a real engine."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import httpx
import pytest

from cluster.local import LocalEngine
from tests.deploy.conftest import CHUNK_SIZE, MODEL, until

PROMPT_TOKENS = 480


async def send(url: str, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": [1000] * PROMPT_TOKENS, "ignore_eos": True, **fields}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


def hang_up(writer: asyncio.StreamWriter, how: str) -> None:
    """FIN: the connection is closed properly. RST: it is thrown away."""
    if how == "RST":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


def nothing_left(engine: LocalEngine) -> bool:
    return engine.scheduler.idle and engine.scheduler.pool.referenced == 0


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_during_prefill(engine: LocalEngine, server_url: str, how: str, streamed: bool) -> None:
    await until(lambda: nothing_left(engine))
    before = engine.scheduler.stats()["iterations"]
    _, writer = await send(server_url, stream=streamed, max_tokens=8)
    await until(lambda: engine.scheduler.stats()["iterations"] >= before + 2)
    hang_up(writer, how)
    await until(lambda: nothing_left(engine))
    iterations = engine.scheduler.stats()["iterations"] - before
    assert iterations < PROMPT_TOKENS / CHUNK_SIZE / 2, "it was prefilled although nobody waited for it"


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("n", [1, 2])
async def test_during_decode(engine: LocalEngine, server_url: str, how: str, n: int) -> None:
    await until(lambda: nothing_left(engine))
    before = engine.scheduler.stats()["iterations"]
    reader, writer = await send(server_url, prompt="Hello", stream=True, max_tokens=400, n=n)
    await reader.readuntil(b"data: ")
    hang_up(writer, how)
    await until(lambda: nothing_left(engine))
    assert engine.scheduler.stats()["iterations"] - before < 40


async def test_a_whole_answer_that_nobody_waits_for(engine: LocalEngine, server_url: str) -> None:
    await until(lambda: nothing_left(engine))
    before = engine.scheduler.stats()["iterations"]
    async with httpx.AsyncClient(base_url=server_url) as client:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.5))
    await until(lambda: nothing_left(engine))
    assert engine.scheduler.stats()["iterations"] - before < 200


async def test_one_that_stays_is_not_disturbed_by_those_that_go(engine: LocalEngine, server_url: str) -> None:
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    async with httpx.AsyncClient(base_url=server_url, timeout=60) as client:
        alone = (await client.post("/v1/completions", json=body)).json()["choices"]
        staying = asyncio.create_task(client.post("/v1/completions", json=body))
        for how in ("FIN", "RST") * 3:
            _, writer = await send(server_url, stream=True, max_tokens=8)
            await asyncio.sleep(0.02)
            hang_up(writer, how)
        assert (await staying).json()["choices"] == alone
    await until(lambda: nothing_left(engine))
