"""A real engine in this process with the API over it: called directly, and through a real HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from workers.checkpoint import resolve
from workers.tokenizer import Tokenizer

MODEL = "smollm2"
MAX_MODEL_LEN = 512
CHUNK_SIZE = 32


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(MODEL))


@pytest_asyncio.fixture(scope="session")
async def engine() -> AsyncIterator[LocalEngine]:
    """Small chunks, so that a prompt of a few hundred tokens takes many iterations."""
    config = EngineConfig(
        model=MODEL, policy="chunked", chunk_size=CHUNK_SIZE, max_model_len=MAX_MODEL_LEN, num_blocks=128
    )
    running = await LocalEngine.start(config)
    yield running
    await running.close()


@pytest.fixture(scope="session")
def api(engine: LocalEngine, tokenizer: Tokenizer) -> FastAPI:
    return create_api(engine, tokenizer)


@pytest_asyncio.fixture(scope="session")
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the API without a network. A response is complete when it arrives, streamed or not."""
    async with in_process(api) as connected:
        yield connected


@pytest_asyncio.fixture(scope="session")
async def server_url(api: FastAPI) -> AsyncIterator[str]:
    async with served(api) as url:
        yield url


def in_process(api: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://api", timeout=120)


@asynccontextmanager
async def served(
    api: ASGIApp,
    send_buffer: int | None = None,
    http: type[asyncio.Protocol] | None = None,
    keep_alive_s: int = 5,
) -> AsyncIterator[str]:
    """The API behind a real HTTP server on a free port, in this event loop. `send_buffer`: bytes that the operating
    system keeps of what a client has not read. `http`: the protocol of a connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = uvicorn.Config(
            api,
            http=http or "auto",
            log_level="warning",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]  # signals are the test run's
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that has no event of its own. The test's time limit ends it where it never comes."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
