"""Refusals that cost next to nothing, where nearly everything is refused.

A refusal costs the processes that it passes some milliseconds each: of a flood, enough to take the processors away from
what was admitted. So who is in front of the API (a replica's HTTP server, Serve's proxy) looks at what becomes of
requests, and where it is mostly 429, passes PASSED for each that is admitted and answers the rest by itself. That is
the adaptive throttling of Google's "Site Reliability Engineering" (2016, chapter 21), each tenant by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.refusal import NO_RETRY, error_body

PASSED = 5.0
"""Requests that are passed for each that is admitted."""
REMEMBERED_S = 1.0
"""What became of requests counts e times less after that."""
ADMITTED_AFTER_S = 1.0
"""Who has no answer after so long, where one that came later was refused, is in: an answer that is not streamed may
begin a minute later, and until then a flood would seem to be refused whole. Where nobody is answered, nobody is in."""
FLOOD = 10.0
"""Refusals within that time that the server can well afford."""
MOST_TENANTS = 1024


@dataclass(slots=True)
class Load:
    """What became of one tenant's requests lately. `credit`: parts of a request to be passed, that add up.
    `refused_last`: the number of the last one that was passed and refused."""

    at: float
    admitted: float = 0.0
    refused: float = 0.0
    credit: float = 0.0
    retry_after: str = "1"
    refused_last: int = 0

    def fade(self, now: float) -> None:
        left = math.exp((self.at - now) / REMEMBERED_S)
        self.at, self.admitted, self.refused = now, self.admitted * left, self.refused * left

    @property
    def share_refused_here(self) -> float:
        """Of the requests that come: 0 where there is no flood, or one in PASSED of them is admitted."""
        if self.refused < FLOOD:
            return 0.0
        all_of_them = self.admitted + self.refused
        return max(0.0, (all_of_them - PASSED * self.admitted) / (all_of_them + 1))


class Throttle:
    """Whose requests are passed. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: OrderedDict[bytes, Load] = OrderedDict()

    def passes(self, tenant: bytes) -> bool:
        load = self._load(tenant)
        load.credit = min(load.credit + 1 - load.share_refused_here, 2.0)
        if load.credit >= 1:
            load.credit -= 1
            return True
        load.refused += 1
        return False

    def answered(self, tenant: bytes, status: int, retry_after: str | None = None, number: int = 0) -> None:
        """What a request that was passed, the `number`th, was answered."""
        load = self._load(tenant)
        if status == 429:
            load.refused += 1
            load.refused_last = max(load.refused_last, number)
            load.retry_after = retry_after or load.retry_after
        else:
            load.admitted += 1

    def retry_after(self, tenant: bytes) -> str:
        """As the server told this tenant last."""
        return self._load(tenant).retry_after

    def refused_last(self, tenant: bytes) -> int:
        """The number of the last of its requests that was passed and refused; 0 for none."""
        return self._load(tenant).refused_last

    def _load(self, tenant: bytes) -> Load:
        now = self._clock()
        load = self._loads.setdefault(tenant, Load(now))
        self._loads.move_to_end(tenant)
        if len(self._loads) > MOST_TENANTS:
            self._loads.popitem(last=False)
        load.fade(now)
        return load


class Throttling:
    """ASGI middleware over all that is posted. A tenant is whoever has one key, and all who have none."""

    def __init__(self, app: ASGIApp, throttle: Throttle | None = None, patience_s: float = ADMITTED_AFTER_S) -> None:
        self._app = app
        self._throttle = throttle or Throttle()
        self._patience_s = patience_s
        self._passed = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tenant = _tenant(scope)
        if not self._throttle.passes(tenant):
            await _refuse(send, self._throttle.retry_after(tenant), waits=_waits_to_send(scope))
            return

        self._passed += 1
        passed = _Passed(self._throttle, tenant, self._passed, self._patience_s)

        async def seeing(message: Message) -> None:
            if message["type"] == "http.response.start":
                passed.answered(message)
            await send(message)

        try:
            await self._app(scope, receive, seeing)
        finally:
            passed.timer.cancel()


class _Passed:
    """A request that was, the `number`th, until it is known what becomes of it."""

    def __init__(self, throttle: Throttle, tenant: bytes, number: int, patience_s: float) -> None:
        self._throttle, self._tenant, self._number, self._patience_s = throttle, tenant, number, patience_s
        self._counted = False
        self._wait()

    def _wait(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(self._patience_s, self._still_there)

    def _still_there(self) -> None:
        if self._throttle.refused_last(self._tenant) < self._number:
            self._wait()
        else:
            self._counted = True
            self._throttle.answered(self._tenant, 200)

    def answered(self, start: Message) -> None:
        self.timer.cancel()
        status, headers = start["status"], Headers(raw=start.get("headers", ()))
        header, no_retry = NO_RETRY
        if status == 429 and headers.get(header) == no_retry:
            return  # for what it asks, whoever else is there: no sign of a flood
        if not self._counted or status == 429:
            self._throttle.answered(self._tenant, status, headers.get("retry-after"), self._number)


def _tenant(scope: Scope) -> bytes:
    return hashlib.sha256("\0".join(Headers(scope=scope).getlist("authorization")).encode("latin-1")).digest()


def _waits_to_send(scope: Scope) -> bool:
    """Whether the client keeps its body back until it hears that it is wanted."""
    return "expect" in Headers(scope=scope)


async def _refuse(send: Send, retry_after: str, waits: bool) -> None:
    """Of one who `waits` nobody knows whether what comes next is the body after all, so that nothing is to come
    next."""
    message = "the server refuses most of what it is asked now, and has not looked at this; try again later"
    body = json.dumps(error_body(429, message, "overloaded")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", retry_after.encode("latin-1")),
    ]
    if waits:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body})
