"""The outermost layer: each request has an id, and whatever escapes becomes an answer, not a closed socket."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.errors import as_api_error, error_response

_LONGEST_ID = 128


class Boundary:
    """ASGI middleware. A client's X-Request-Id is given back, never used as a name of ours: it may come twice.

    Without `answer_ids` it is somebody else, such as Serve's proxy, who gives it back.
    """

    def __init__(self, app: ASGIApp, answer_ids: bool = True) -> None:
        self._app = app
        self._answer_ids = answer_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._answer_ids:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            answer = as_api_error(error)
            if started:
                raise
            await error_response(answer)(scope, receive, send_with_id)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
