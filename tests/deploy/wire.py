"""Helpers to read the API's answers as a client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx

JsonObject = dict[str, Any]


def events(body: str) -> list[JsonObject]:
    """The events of a complete stream, which has to end with [DONE] and hold nothing after it."""
    assert body.endswith("data: [DONE]\n\n"), body[-200:]
    blocks = body.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    assert [block for block in blocks if block == "data: [DONE]"] == blocks[-1:]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def text_of(streamed: list[JsonObject], index: int = 0) -> str:
    """The joined text of one choice of a stream, completion or chat."""
    choices = [choice for event in streamed for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finishes(streamed: list[JsonObject], index: int = 0) -> list[str]:
    choices = [choice for event in streamed for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def error_of(response: httpx.Response, status: int) -> JsonObject:
    """The error of an answer, which has to have this status and OpenAI's shape exactly."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: JsonObject = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    return error
