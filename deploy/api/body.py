"""A request's body as a JSON object, or an error that says what is wrong with it. Nothing a client sends gets past
this that could not be written down again as UTF-8 JSON."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from deploy.api.errors import ApiError, bad_request, shorten

Parsed = TypeVar("Parsed")

_INLINE_BYTES = 64 * 2**10
"""Larger bodies are parsed on a thread, so that running streams do not wait for them."""
_DISCARDED_BYTES = 64 * 2**20
_DISCARD_S = 2.0
"""How much of a refused body is read before it is answered, and for how long."""
_MAYBE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limit: int, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """`parse` applied to the body's object. Raises ApiError (400, 413, 415), and what `parse` raises."""
    try:
        _check_content_type(request)
        raw = await _read(request, limit)
    except ApiError:
        await discard_rest(request)
        raise

    def understand() -> Parsed:
        constants: list[str] = []
        parsed = parse(_parse_object(raw, constants))
        if constants:  # where one stands for a value that is looked at, `parse` has already said so by name
            raise _invalid(f"the request body is not valid JSON: {constants[0]} is no JSON value")
        return parsed

    return understand() if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(understand)


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415, f"the content type must be application/json, not {shorten(kind)}", code="unsupported_media_type"
        )
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters.lower())
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"the charset must be utf-8, not {charset[1]}", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"content encoding {shorten(encoding)} is not supported", code="unsupported_media_type")


async def _read(request: Request, limit: int) -> bytes:
    if _declared(request) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete", code="client_disconnected") from None
    return bytes(body)


def _declared(request: Request) -> float:
    """Bytes that the body is said to have; 0 where nothing is said that can be understood."""
    text = request.headers.get("content-length", "")
    if not (text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) <= 18 else math.inf


async def discard_rest(request: Request) -> None:
    """Take in what the client is still sending, within bounds: where a connection is closed on unread bytes, the reset
    overtakes the answer, and the client never learns what was wrong."""
    if "expect" in request.headers or _declared(request) > _DISCARDED_BYTES:
        return  # it has not begun, or will not come to an end soon
    left = _DISCARDED_BYTES
    with suppress(ClientDisconnect, TimeoutError, RuntimeError):  # gone, too slow, or nothing is left to read
        async with asyncio.timeout(_DISCARD_S):
            async for part in request.stream():
                left -= len(part)
                if left < 0:
                    return


def _too_large(limit: int) -> ApiError:
    # The rest of the body may not have been read, so the connection cannot be used for another request.
    message = f"the request body is larger than the limit of {limit} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _parse_object(raw: bytes, constants: list[str]) -> dict[str, Any]:
    """NaN and Infinity, which are no JSON, become floats, and are noted in `constants`."""

    def note(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        text = raw.decode("utf-8-sig")
        parsed = json.loads(text, parse_constant=note)
        if _MAYBE_SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _invalid(f"the request body is not valid UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise _invalid("the request body has an escaped lone surrogate, which is no text") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _invalid(f"the request body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise _invalid("the request body is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise _invalid(f"the request body is not valid JSON: {shorten(str(error))}") from None
    if not isinstance(parsed, dict):
        raise _invalid("the request body must be a JSON object")
    return parsed


def _invalid(message: str) -> ApiError:
    return bad_request(message, None, "invalid_json")
