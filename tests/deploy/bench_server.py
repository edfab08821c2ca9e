"""A server that says what a test wants it to say and when, on a real socket: the load test's other side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.workloads import PlannedRequest

Body = dict[str, Any]
MODELS = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}


class Reply:
    """What a script answers with. The connection closes when the script returns."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def json(self, status: int, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
        await self.raw(head.encode() + raw)

    async def open(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    async def event(self, content: Any) -> None:
        await self.raw(f"data: {json.dumps(content)}\n\n".encode())

    async def done(self) -> None:
        await self.raw(b"data: [DONE]\n\n")

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        self._writer.transport.abort()


Script = Callable[[Body, Reply], Awaitable[None]]


@dataclass
class FakeServer:
    """`bodies` of all requests but the small ones of the detection, which `speak` answers."""

    script: Script
    refuses: Callable[[Body], str | None] = lambda body: None
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    probes: list[Body] = field(default_factory=list)
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            reply = Reply(writer)
            if head[0].startswith("GET"):
                await reply.json(200, MODELS)
            else:
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                await self._answer(body, headers, reply)
            writer.close()

    async def _answer(self, body: Body, headers: dict[str, str], reply: Reply) -> None:
        small = 2 in (body.get("max_tokens"), body.get("max_completion_tokens"))
        if small:
            self.probes.append(body)
        if refusal := self.refuses(body):
            await reply.json(400, {"error": {"message": refusal, "code": "unknown_parameter"}})
        elif small:
            await speak(body, reply)
        else:
            self.bodies.append(body)
            self.headers.append(headers)
            await self.script(body, reply)


async def speak(body: Body, reply: Reply) -> None:
    """As many tokens as were asked for, one in a chunk, with their ids."""
    await reply.open()
    for token in range(body.get("max_tokens", 1)):
        await reply.event({"choices": [{"text": "a", "token_ids": [token], "finish_reason": None}]})
    await reply.done()


@asynccontextmanager
async def fake(
    script: Script = speak, refuses: Callable[[Body], str | None] = lambda body: None
) -> AsyncIterator[FakeServer]:
    server = FakeServer(script, refuses)
    tasks: set[asyncio.Task[None]] = set()

    def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(server.handle(reader, writer)))

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def plan(prompt: str = "hello", at_s: float = 0.0, output_tokens: int = 3) -> PlannedRequest:
    return PlannedRequest(prompt, output_tokens, at_s)
