"""What clients may do to an HTTP server before a request of theirs is whole, and after they are gone.

Those of API replicas, behind HAProxy, and that of Serve's proxy are uvicorn with httptools, which takes headers of any
length and waits for them for ever. Ray calls `bound_connections` in such a process, before that serves, where the
variable `VARIABLE` names it, as `stallfree serve` has it do on a Ray of its own.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.middleware import Middleware
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deploy.arrival import Arrival
from deploy.refusal import http_answer
from deploy.throttle import Throttling

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH = "deploy.front_door.bound_connections"

LAST_READ_S = 1.0
"""What a client still sends after it was refused is taken in and thrown away for so long: who closes a connection that
has something to be read resets it, and the other side may never see why."""


def _most_connections() -> int:
    """Three quarters of the files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft * 3 // 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """`head_bytes` of a request's line and headers; more is noticed after one read of a socket. `head_s`, `body_s`: for
    all of its head (the first one's counts from the connection), and of its body. `silence_s`: a client that
    acknowledges nothing, or makes no room for what is to be sent, is gone after that."""

    head_bytes: int = 64 * 2**10
    head_s: float = 60.0
    body_s: float = 300.0
    silence_s: float = 60.0
    connections: int = field(default_factory=_most_connections)


class BoundedHttp(HttpToolsProtocol):
    """One connection. What breaks a bound is answered with a 4xx or 503, and closed."""

    bounds: ClassVar[Bounds] = Bounds()
    _head_bytes: int | None = 0
    """Of the head that is being read; None where a body or nothing is."""
    _behind_another: bool = False
    """Whether a request ended in what is being read now: how much of that is of the next one's head is not known."""
    _timer: asyncio.TimerHandle | None = None
    _refused: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        notice_who_is_gone(transport.get_extra_info("socket"), self.bounds.silence_s)
        self._within(self.bounds.head_s)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "too_many_connections", "too many connections are open; try later")

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._behind_another = False
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += 1 if self._behind_another else len(data)
            if self._head_bytes > self.bounds.head_bytes:
                most = f"{self.bounds.head_bytes:,} bytes"
                self._refuse(431, "headers_too_large", f"the headers are longer than {most}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    # The parser's calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._within(self.bounds.head_s)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._within(self.bounds.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._cancel_timer()
        self._behind_another = True
        super().on_message_complete()
        if self.cycle.response_complete:  # uvicorn counts from the answer, and its body ended that
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def handle_websocket_upgrade(self) -> None:
        self._cancel_timer()
        super().handle_websocket_upgrade()

    # What is not waited for.

    def _within(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._too_late, seconds)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self, seconds: float) -> None:
        unanswered = self.cycle is None or self.cycle.response_complete
        if self._head_bytes == 0 or (self._head_bytes is None and self.cycle.response_complete):
            self.transport.close()  # nothing was asked, or nobody wants the rest of this body
        elif unanswered or not (self._head_bytes is not None or self.cycle.response_started):
            self._refuse(408, "request_timeout", f"the request was not there within {seconds:g} s")
        else:  # an answer is on its way, to this request or to the one before
            self._within(seconds)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refused = True
        self._cancel_timer()
        if self._head_bytes is None and self.cycle is not None:  # its body was not there; nobody is to answer it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.is_closing():
            self.transport.write(http_answer(status, code, message))
            self.loop.call_later(LAST_READ_S, self.transport.close)


def notice_who_is_gone(connection: socket.socket | None, silence_s: float) -> None:
    """Have the operating system (Linux) end a connection whose other side has been gone or has not taken anything for
    that long, whether something is to be sent to it or not."""
    if connection is None or not hasattr(socket, "TCP_USER_TIMEOUT") or connection.family == socket.AF_UNIX:
        return
    probes = 3
    every = max(1, int(silence_s / (probes + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def bound_connections() -> list[Middleware]:
    """To be called by Serve in the process of such a server. Connections are bounded before there is a request for a
    middleware; those that it returns note when a request came, and bound what a flood costs."""
    auto.AutoHTTPProtocol = BoundedHttp
    return [Middleware(Arrival), Middleware(Throttling)]
