"""Requests that schemathesis makes of the API's own description, right and wrong, over a real HTTP server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from tests.deploy.conftest import served, until
from tests.deploy.test_disconnect import nothing_left
from tests.deploy.tries import tries
from workers.tokenizer import Tokenizer

NAME = "tiny"
POSTED = ("POST /v1/completions", "POST /v1/chat/completions")
WAIT_S = 60
"""A request that has not been answered by then hangs."""


@pytest_asyncio.fixture(scope="module")
async def server(tiny_model_dir: Path) -> AsyncIterator[tuple[LocalEngine, str]]:
    config = EngineConfig(
        model=str(tiny_model_dir), served_model_name=NAME, max_model_len=96, num_blocks=64, profile_seconds=0,
        policy="chunked", threads=1,
    )  # fmt: skip
    engine = await LocalEngine.start(config)
    async with served(create_api(engine, Tokenizer.load(tiny_model_dir))) as url:
        yield engine, url
    await engine.close()


def try_all(url: str, examples: int) -> dict[str, Counter[int]]:
    """So many requests for each operation. Returns the statuses that came."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return {found.ok().label: try_one(found.ok(), examples) for found in schema.get_all_operations()}


def try_one(operation: Any, examples: int) -> Counter[int]:
    statuses: Counter[int] = Counter()

    @tries(examples)
    @given(operation.as_strategy(), st.integers(0, 9))
    def one(case: Any, dice: int) -> None:
        if isinstance(case.body, dict) and dice:  # or hardly anything would get beyond the model's name
            case.body["model"] = NAME
        answer = case.call(timeout=WAIT_S)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=[not_a_server_error])
        if answer.status_code >= 400 and case.method != "HEAD":
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, error

    one()
    return statuses


async def is_as_before(engine: LocalEngine, url: str) -> None:
    await until(lambda: nothing_left(engine))
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200


async def test_what_the_description_allows_and_more(server: tuple[LocalEngine, str]) -> None:
    engine, url = server
    done = await asyncio.to_thread(try_all, url, 100)
    assert {"GET /v1/models", "GET /health"} <= done.keys()
    for name in POSTED:
        assert done[name].total() >= 100, "bodies are made of the description"
        assert {200, 400, 404} <= done[name].keys(), done[name]
    await is_as_before(engine, url)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_thousands_of_them(server: tuple[LocalEngine, str]) -> None:
    engine, url = server
    done = await asyncio.to_thread(try_all, url, 2000)
    assert all(done[name].total() >= 2000 for name in POSTED)
    assert all(min(done[name][200], done[name][400]) > 20 for name in POSTED), done
    await is_as_before(engine, url)
