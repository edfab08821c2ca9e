"""What a refusal looks like, whoever answers: the API, or Serve's proxy in front of it, which imports nothing of the
API."""

from __future__ import annotations

from typing import Any

NO_RETRY = "X-Should-Retry", "false"
"""A header of refusals that would come as well with nobody else there; OpenAI's clients go by it."""


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """In OpenAI's shape."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
