"""Clients that never come to the point, or are gone: the protocol that Serve's proxy speaks, here without the proxy."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.local import LocalEngine
from deploy.api import create_api
from deploy.front_door import IMPORT_PATH, VARIABLE, BoundedHttp, Bounds, notice_who_is_gone
from tests.deploy.conftest import served, until
from tests.deploy.test_disconnect import nothing_left
from tests.deploy.test_hostile import HELLO, SMALL, answer, connect, engine, head, is_served, open_all, tokenizer
from workers.tokenizer import Tokenizer

__all__ = ["engine", "tokenizer"]  # fixtures


class Impatient(BoundedHttp):
    bounds = Bounds(head_bytes=8192, head_s=0.2, body_s=0.5, silence_s=1.0, connections=30)


@pytest_asyncio.fixture(scope="module")
async def url(engine: LocalEngine, tokenizer: Tokenizer) -> AsyncIterator[str]:
    async with served(create_api(engine, tokenizer), http=Impatient) as url:
        yield url


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /health HTTP/1.1\r\nX: ", b"a" * 1000),
        (b"GET /health HTTP/1.1\r\n", b"Name: value\r\n" * 100),
        (b"GET /" + b"a" * 1000, b"a" * 1000),
        (b"", b"\r\n" * 500),
    ],
    ids=["a value without end", "headers without end", "a path without end", "empty lines"],
)
async def test_a_head_without_end(url: str, start: bytes, more: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with open_all([client := await connect(url)]):
        reading = asyncio.create_task(answer(client))
        await loop.sock_sendall(client, start)
        with suppress(ConnectionError):
            while not reading.done():
                await loop.sock_sendall(client, more)
                await asyncio.sleep(0)
        status, content = await reading
        assert status in (400, 431)  # a path may be too long for the parser before it is for us
        assert status == 400 or content["error"]["code"] == "headers_too_large"
    await is_served(url)


@pytest.mark.parametrize(
    "sent",
    [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", head(1000) + b'{"model": '],
    ids=["half a head", "half a body"],
)
async def test_half_a_request_is_not_waited_for(engine: LocalEngine, url: str, sent: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with open_all([client := await connect(url)]):
        await loop.sock_sendall(client, sent)
        status, content = await answer(client)
        assert (status, content["error"]["code"]) == (408, "request_timeout")
        assert await loop.sock_recv(client, 1) == b"", "and the connection is closed"
    await is_served(url)
    await until(lambda: nothing_left(engine))


async def test_a_connection_for_nothing_is_closed_without_a_word(url: str) -> None:
    """A word might be taken for the answer to a request that is just being sent."""
    async with open_all([client := await connect(url)]):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_an_answer_may_take_longer_than_a_request(url: str) -> None:
    """And a connection may be used again, as long as it is."""
    body = {**HELLO, "max_tokens": 500, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            text = (await client.post("/v1/completions", json=body)).text
            assert text.endswith("data: [DONE]\n\n")
            assert asyncio.get_running_loop().time() - began > Impatient.bounds.head_s, "or this shows nothing"


@pytest.mark.parametrize("more", [0, 2 * Impatient.bounds.head_bytes], ids=["a small body", "a body above the bound"])
async def test_the_start_of_a_next_request_does_not_end_the_answer_to_the_first(url: str, more: int) -> None:
    """What comes in one read is of both, and only the next one's part of it counts as its head."""
    loop = asyncio.get_running_loop()
    body = json.dumps({**HELLO, "max_tokens": 500, "stream": True}).encode() + b" " * more
    async with open_all([client := await connect(url)]):
        await loop.sock_sendall(client, head(len(body)) + body + b"GET /health HTTP/1.1\r\n")
        received = b""
        while part := await loop.sock_recv(client, 65536):
            received += part
        assert b"data: [DONE]" in received
        assert received.count(b"HTTP/1.1 ") == 2
        assert b"408" in received.split(b"[DONE]")[1]


async def test_a_body_that_comes_after_its_refusal_is_read_and_forgotten() -> None:
    """It is no part of the next request; and a connection that is idle after it is closed like any other."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 429, "headers": headers})
            await send({"type": "http.response.body", "body": b"{}"})

    loop = asyncio.get_running_loop()
    async with (
        served(refuse, http=BoundedHttp, keep_alive_s=1) as url,
        open_all([client := await connect(url)]),
    ):
        for _ in range(3):
            await loop.sock_sendall(client, head(4 * 2**20))
            assert await answer(client) == (429, {})
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n" * (4 * 2**20 // 18) + b" " * (4 * 2**20 % 18))
        assert await loop.sock_recv(client, 1) == b"", "nothing in it was taken for a request"


async def test_one_who_makes_no_room_is_gone_after_a_while(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """Although the server's own buffers have no bound here: the operating system ends the connection."""
    fields = {"stream": True, "logprobs": 20, "max_tokens": 1900, "temperature": 1, "n": 2}
    body = json.dumps({**HELLO, **fields}).encode()
    async with (
        served(create_api(engine, tokenizer), send_buffer=SMALL, http=Impatient) as url,
        open_all([client := await connect(url, SMALL)]),
    ):
        await asyncio.get_running_loop().sock_sendall(client, head(len(body)) + body)
        await until(lambda: not nothing_left(engine))
        await until(lambda: nothing_left(engine))
        with pytest.raises(ConnectionError):
            await rest(client)


async def rest(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 65536):
        pass


async def test_more_connections_than_are_allowed(url: str) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(Impatient.bounds.connections):
            stack.callback((await connect(url)).close)
        stack.callback((one_more := await connect(url)).close)
        status, content = await answer(one_more)
        assert (status, content["error"]["code"]) == (503, "too_many_connections")
    await is_served(url)


def test_a_connection_whose_other_side_is_gone_is_noticed() -> None:
    """Nobody can be made to vanish here without a word; so this asks the operating system what it will do."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            notice_who_is_gone(accepted, 60.0)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, count = (
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * count <= 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_proxy_that_is_told_to_speaks_it() -> None:
    """Serve reads the variable, calls what it names, and leaves the choice of a protocol to uvicorn."""
    program = (
        "from ray.serve._private.http_util import configure_http_middlewares;"
        "from ray.serve.config import HTTPOptions; from uvicorn.config import Config;"
        "around = configure_http_middlewares(HTTPOptions()).middlewares;"
        "config = Config(lambda: None, factory=True); config.load();"
        "print(config.http_protocol_class.__name__, *[each.cls.__name__ for each in around])"
    )
    environment = {**os.environ, VARIABLE: IMPORT_PATH}
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["BoundedHttp", "Arrival", "Throttling"]
    config = Config(lambda: None)  # type: ignore[arg-type]
    config.load()
    assert config.http_protocol_class is HttpToolsProtocol, "no other process is changed"
