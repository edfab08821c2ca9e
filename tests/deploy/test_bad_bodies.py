"""Bodies that are no JSON object, or too large, and paths that do not exist."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.deploy.conftest import MODEL
from tests.deploy.refusals import CHAT, COMPLETIONS, HELLO, refused, the_next_request_works  # noqa: F401
from tests.deploy.wire import error_of

# What is no JSON object at all, and what is no request.


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"nonsense", b'{"model": }', b'{"a": 1,}', b"\xff\xfe", b'{"model": "\xe9"}', b"[]", b"null",
        b"5", b'"text"', b'{"model": "\\ud800"}', b'{"model": "smollm2", "prompt": "\\udc00 a"}',
        b'{"model": "smollm2", "prompt": "\\uDFFF"}', b'{"model": "smollm2", "prompt": "\\udc00\\ud800"}',
        b"[" * 100_000, b'{"metadata": ' * 50_000, b'{"n": ' + b"1" * 10_000 + b"}", b"\x00", b'{"prompt": "\x01"}',
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert error_of(response, 400)["code"] == "invalid_json"


async def test_null_characters_and_other_odd_text_are_text(client: httpx.AsyncClient) -> None:
    for text in ("a\x00b", "\ufeff\ufffe\uffff", "\u202e\u200b", "a" * 600, "<|im_end|><|im_start|>"):
        body = {"model": MODEL, "prompt": text, "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200, text


async def test_nesting_that_python_can_read_but_nobody_asked_for(client: httpx.AsyncClient) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    for path, fields in ((COMPLETIONS, {"prompt": deep}), (CHAT, {"messages": deep}), (CHAT, {"stop": deep})):
        await refused(client, path, **fields)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_content_types(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Hello"})
    response = await client.post(COMPLETIONS, content=body, headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_that_are_too_large(client: httpx.AsyncClient, declared: bool) -> None:
    body = b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}'

    async def in_parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    headers = {"content-type": "application/json"}
    response = await client.post(COMPLETIONS, content=body if declared else in_parts(), headers=headers)
    assert error_of(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_a_refused_body_is_answered_though_its_client_is_still_sending(
    server_url: str, content_type: str
) -> None:
    """On a real socket: closing it on unread bytes would reset the connection, and the answer with it."""
    status = {"application/json": 413, "text/plain": 415}[content_type]
    async with httpx.AsyncClient(base_url=server_url, timeout=60, trust_env=False) as client:
        for _ in range(5):
            response = await client.post(
                COMPLETIONS, content=b"a" * (9 * 2**20), headers={"content-type": content_type}
            )
            error_of(response, status)


async def test_routes_and_methods(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await client.post("/v1/completions/"), 404)["code"] == "not_found"
    assert error_of(await client.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(await client.delete("/health"), 405)["code"] == "method_not_allowed"
