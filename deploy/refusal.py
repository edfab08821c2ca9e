"""What a refusal looks like, whoever answers: the API, or what is in front of it (the HTTP server of a replica or of
Serve's proxy, HAProxy), which imports nothing of the API."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

NO_RETRY = "X-Should-Retry", "false"
"""A header of refusals that would come as well with nobody else there; OpenAI's clients go by it."""


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """In OpenAI's shape."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def http_answer(status: int, code: str, message: str, *fields: str) -> bytes:
    """The same with all that is HTTP about it, after which the connection is closed. `fields`: more of its headers."""
    body = json.dumps(error_body(status, message, code))
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *fields,
        "Connection: close",
    ]
    return "\r\n".join([*head, "", body]).encode()
