"""Requests that schemathesis makes of the API's own description, right and wrong, over a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from tests.deploy.conftest import served, until
from tests.deploy.test_disconnect import nothing_left
from tests.deploy.tries import tries
from workers.tokenizer import Tokenizer

WAIT_S = 60
"""A request that has not been answered by then hangs."""


@pytest_asyncio.fixture(scope="module")
async def server(tiny_model_dir: Path) -> AsyncIterator[tuple[LocalEngine, str]]:
    config = EngineConfig(
        model=str(tiny_model_dir), served_model_name="tiny", max_model_len=96, num_blocks=64, profile_seconds=0,
        policy="chunked", threads=1,
    )  # fmt: skip
    engine = await LocalEngine.start(config)
    async with served(create_api(engine, Tokenizer.load(tiny_model_dir))) as url:
        yield engine, url
    await engine.close()


def try_all(url: str, examples: int) -> dict[str, int]:
    """So many requests for each operation. Returns how many there were."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return {found.ok().label: try_one(found.ok(), examples) for found in schema.get_all_operations()}


def try_one(operation: Any, examples: int) -> int:
    count = 0

    @tries(examples)
    @given(operation.as_strategy())
    def one(case: Any) -> None:
        nonlocal count
        count += 1
        answer = case.call(timeout=WAIT_S)
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400 and case.method != "HEAD":
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, error

    one()
    return count


async def is_as_before(engine: LocalEngine, url: str) -> None:
    await until(lambda: nothing_left(engine))
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200


async def test_what_the_description_allows_and_more(server: tuple[LocalEngine, str]) -> None:
    engine, url = server
    done = await asyncio.to_thread(try_all, url, 25)
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /health"} <= done.keys()
    await is_as_before(engine, url)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_thousands_of_them(server: tuple[LocalEngine, str]) -> None:
    engine, url = server
    done = await asyncio.to_thread(try_all, url, 2000)
    assert sum(done.values()) > 5_000
    await is_as_before(engine, url)
