"""What the tests of wrong requests have in common: the error they expect, and that the next request works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio

from tests.deploy.conftest import MODEL
from tests.deploy.wire import JsonObject, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(autouse=True)
async def the_next_request_works(client: httpx.AsyncClient) -> AsyncIterator[None]:
    yield
    response = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "Hi", "max_tokens": 1})
    assert response.status_code == 200, response.text


async def refused(client: httpx.AsyncClient, path: str, status: int = 400, **fields: Any) -> JsonObject:
    """The error of a request that would be fine but for `fields`. Written by Python's json, which knows NaN."""
    basis: JsonObject = {"model": MODEL, "max_tokens": 2}
    basis |= {"prompt": "Hello"} if path == COMPLETIONS else {"messages": HELLO}
    body = json.dumps(basis | fields)
    return error_of(await client.post(path, content=body, headers={"content-type": "application/json"}), status)
