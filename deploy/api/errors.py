"""Errors as OpenAI shapes them: {"error": {"message", "type", "param", "code"}}, whatever went wrong and wherever."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cluster.engine import EngineUnavailable
from deploy.refusal import NO_RETRY, error_body
from scheduler.errors import RequestRefused

logger = logging.getLogger(__name__)

_REFUSAL_STATUS = {"queue_full": 429, "slo_infeasible": 429}


class ApiError(Exception):
    """An error of one request, ready to be sent. `code` is stable and machine-readable, `param` names the culprit."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.code, self.param)


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code or "invalid_value", param=param)


def shorten(value: object, limit: int = 80) -> str:
    """A client's value, fit to be repeated in a message."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_api_error(error: BaseException, retry_after_s: int = 1) -> ApiError:
    """What a client is told about an exception; one that nobody expected is logged and its words are kept."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        status = _REFUSAL_STATUS.get(error.code, 400)
        headers = _when_to_retry(error, retry_after_s) if status == 429 else None
        return ApiError(status, error.message, code=error.code, param=error.param, headers=headers)
    if isinstance(error, EngineUnavailable):
        headers = {"Retry-After": str(retry_after_s)}
        return ApiError(503, f"the engine cannot serve now: {error}", code="engine_unavailable", headers=headers)
    if isinstance(error, HTTPException):
        return _from_http(error)
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log says more", code="internal_error")


def _when_to_retry(error: RequestRefused, usually_s: int) -> dict[str, str]:
    """Seconds; and where it is not worth it, a word of that."""
    if error.retry_after_s is None:
        return {"Retry-After": str(usually_s)}
    if error.retry_after_s == math.inf:
        return {"Retry-After": str(usually_s)} | dict([NO_RETRY])
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def error_response(error: ApiError) -> Response:
    body = json.dumps(error.body).encode()
    return Response(body, error.status, headers=error.headers, media_type="application/json")


def install_error_handlers(app: FastAPI, retry_after_s: int) -> None:
    """Route every exception, the framework's own included, to the one shape."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            return error_response(_from_http(error, request))
        return error_response(as_api_error(error, retry_after_s))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # what it is registered for
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(bad_request(f"{name}: {first['msg']}", name))

    app.add_exception_handler(RequestValidationError, refuse)
    for kind in (ApiError, RequestRefused, EngineUnavailable, HTTPException):
        app.add_exception_handler(kind, handle)


def _from_http(error: HTTPException, request: Request | None = None) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = str(error.detail or HTTPStatus(error.status_code).phrase)
    if request is not None and error.status_code == 404:
        message = f"Unknown route: {shorten(f'{request.method} {request.url.path}', 200)}"
    elif request is not None:
        message = f"{shorten(request.method)} is not allowed for {shorten(request.url.path, 200)}"
    return ApiError(error.status_code, message, code=code, headers=error.headers)
