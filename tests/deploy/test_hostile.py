"""Clients that mean no good, or are broken, on real sockets: each has a clear end, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import ApiSettings, create_api
from tests.deploy.conftest import served, until
from tests.deploy.test_disconnect import nothing_left
from workers.tokenizer import Tokenizer

NAME = "tiny"
HELLO = {"model": NAME, "prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
SMALL = 4096
"""Bytes of a socket's buffer."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest_asyncio.fixture(scope="module")
async def engine(tiny_model_dir: Path) -> AsyncIterator[LocalEngine]:
    config = EngineConfig(
        model=str(tiny_model_dir), served_model_name=NAME, max_model_len=2048, num_blocks=512, profile_seconds=0
    )
    running = await LocalEngine.start(config)
    yield running
    await running.close()


@pytest_asyncio.fixture(scope="module")
async def server_url(engine: LocalEngine, tokenizer: Tokenizer) -> AsyncIterator[str]:
    async with served(create_api(engine, tokenizer)) as url:
        yield url


async def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


def head(body_bytes: int, path: str = "/v1/completions") -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {body_bytes}"
    return "\r\n".join((*lines, "", "")).encode()


async def answer(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of an answer that closes or says its length."""
    received = b""
    while True:
        received += (part := await asyncio.get_running_loop().sock_recv(client, 65536))
        top, _, body = received.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in top.split(b"\r\n") if line.lower().startswith(b"content-length")]
        if not part or (lengths and len(body) >= int(lengths[0])):
            return int(top.split()[1]), json.loads(body)


async def is_served(url: str) -> None:
    """As if nobody else were there: a health check and a completion, each well within a client's usual patience."""
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        health, completion = await asyncio.gather(client.get("/health"), client.post("/v1/completions", json=HELLO))
    assert health.status_code == 200
    assert completion.json()["usage"]["completion_tokens"] == 4


@asynccontextmanager
async def open_all(sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for client in sockets:
            client.close()


@pytest.mark.parametrize("n", [1, 2])
async def test_one_who_stops_reading_has_the_request_ended(engine: LocalEngine, tokenizer: Tokenizer, n: int) -> None:
    """While the connection stands, long before the request would have come to its end by itself."""
    await until(lambda: nothing_left(engine))
    api = create_api(engine, tokenizer, ApiSettings(send_timeout_s=0.1))
    async with served(api, send_buffer=SMALL) as url:
        before = engine.scheduler.stats()["iterations"]
        fields = {"stream": True, "logprobs": 20, "max_tokens": 1900, "temperature": 1, "n": n}
        body = json.dumps({**HELLO, **fields}).encode()
        async with open_all([client := await connect(url, SMALL)]):
            await asyncio.get_running_loop().sock_sendall(client, head(len(body)) + body)
            await until(lambda: not nothing_left(engine))
            await is_served(url)
            await until(lambda: nothing_left(engine))
            assert engine.scheduler.stats()["iterations"] - before < 1500
        await is_served(url)


async def test_one_who_reads_slowly_is_served(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    api = create_api(engine, tokenizer, ApiSettings(send_timeout_s=5))
    async with served(api, send_buffer=SMALL) as url:
        fields = {"stream": True, "logprobs": 20, "max_tokens": 60}
        body = json.dumps({**HELLO, **fields}).encode()
        async with open_all([client := await connect(url, SMALL)]):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, head(len(body)) + body)
            received = b""
            while b"[DONE]" not in received:
                received += (part := await loop.sock_recv(client, 2048))
                assert part, received[-200:]
                await asyncio.sleep(0.005)
        assert received.count(b"data: ") > 40  # a token that is half a character has no event of its own


async def test_a_thousand_idle_connections(server_url: str) -> None:
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(1000):
            clients.append(await connect(server_url))
            stack.callback(clients[-1].close)
        await is_served(server_url)
        await is_served(server_url)
        assert all(not client._closed for client in clients)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"P",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        head(1000) + b'{"model": ',
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["nothing", "a letter", "half a head", "half a body", "half a chunk"],
)
async def test_half_a_request_holds_nobody_up(engine: LocalEngine, server_url: str, sent: bytes) -> None:
    """Fifty of them at once; then they go away, half of them by closing their side only."""
    clients = [await connect(server_url) for _ in range(50)]
    async with open_all(clients):
        for client in clients:
            await asyncio.get_running_loop().sock_sendall(client, sent)
        await is_served(server_url)
        for client in clients[::2]:
            client.shutdown(socket.SHUT_WR)
        await is_served(server_url)
    await until(lambda: nothing_left(engine))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 60,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_refused_or_closed(server_url: str, sent: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with open_all([client := await connect(server_url)]):
        with suppress(ConnectionError):
            await loop.sock_sendall(client, sent)
            client.shutdown(socket.SHUT_WR)
            received = b""
            while part := await loop.sock_recv(client, 65536):
                received += part
            assert not received or int(received.split()[1]) in range(400, 500), received
    await is_served(server_url)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "\xff\xfe"}', 400, "invalid_json"),
        (b'{"prompt": ' + b"[" * 500_000, 400, "invalid_json"),
        (b'{"messages": ' * 200_000, 400, "invalid_json"),
        (b"x" * (9 * 2**20), 413, "request_too_large"),
    ],
    ids=["no UTF-8", "deep arrays", "deep objects", "too large"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies(server_url: str, path: str, body: bytes, status: int, code: str) -> None:
    async with open_all([client := await connect(server_url)]):
        await asyncio.get_running_loop().sock_sendall(client, head(len(body), path) + body)
        said, content = await answer(client)
        assert (said, content["error"]["code"]) == (status, code)
    await is_served(server_url)


async def test_a_body_that_never_ends(server_url: str) -> None:
    """Chunked, so that its length is not known beforehand."""
    loop = asyncio.get_running_loop()
    lines = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"
    async with open_all([client := await connect(server_url)]):
        await loop.sock_sendall(client, "\r\n".join((*lines, "", "")).encode())
        reading = asyncio.create_task(answer(client))
        with suppress(ConnectionError):
            while not reading.done():
                await loop.sock_sendall(client, b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        status, content = await reading
        assert (status, content["error"]["code"]) == (413, "request_too_large")
    await is_served(server_url)
