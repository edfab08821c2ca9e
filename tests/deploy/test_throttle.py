"""Floods: how many requests the proxy passes of those that are mostly refused, whose, and what the others are told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from deploy.api.errors import as_api_error
from deploy.arrival import HEADER, LONGEST_S, Arrival, seconds_on_its_way
from deploy.throttle import PASSED, Throttle, Throttling
from scheduler.errors import RequestRefused


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Admits every `one_in`th request that reaches it."""

    def __init__(self, throttle: Throttle, one_in: int) -> None:
        self.throttle, self.one_in = throttle, one_in
        self.reached = self.admitted = 0

    def asked(self, tenant: bytes = b"a") -> None:
        if not self.throttle.passes(tenant):
            return
        self.reached += 1
        taken = self.reached % self.one_in == 0
        self.admitted += taken
        self.throttle.answered(tenant, 200 if taken else 429)


def seconds(clock: Clock, count: float, per_s: int) -> Iterator[None]:
    for _ in range(round(count * per_s)):
        clock.now += 1 / per_s
        yield


def test_few_refusals_are_afforded() -> None:
    clock = Clock()
    server = Server(Throttle(clock), one_in=10**9)
    for _ in seconds(clock, 20, per_s=8):
        server.asked()
    assert server.reached == 160, "all of them, though none is admitted"


def test_a_burst_that_is_admitted_is_passed_whole() -> None:
    throttle = Throttle(Clock())
    assert all(throttle.passes(b"a") for _ in range(1000)), "nothing is known of any yet"
    for _ in range(1000):
        throttle.answered(b"a", 200)
    assert all(throttle.passes(b"a") for _ in range(1000))


@pytest.mark.parametrize("one_in", [2, 3])
def test_where_enough_is_admitted_all_is_passed(one_in: int) -> None:
    clock = Clock()
    server = Server(Throttle(clock), one_in)
    for _ in seconds(clock, 10, per_s=100):
        server.asked()
    assert server.reached == 1000


def test_of_a_flood_a_few_are_passed_and_of_another_tenant_all() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    flooding, other = Server(throttle, one_in=50), Server(throttle, one_in=1)
    for number, _ in enumerate(seconds(clock, 60, per_s=200)):
        flooding.asked(b"a")
        if number % 100 == 0:
            other.asked(b"b")
    assert 60 < flooding.reached < 60 * 20, "some are passed every second, but not many of 200"
    assert flooding.admitted > 0
    assert other.reached == 120


def test_what_is_admitted_in_a_flood_finds_its_way() -> None:
    """A server that takes six a second is asked by five times as many, and takes its six."""
    clock = Clock()
    throttle = Throttle(clock)
    reached = admitted = 0
    free_at = clock.now
    for _ in seconds(clock, 60, per_s=300):
        if throttle.passes(b"a"):
            reached += 1
            taken = clock.now >= free_at
            if taken:
                admitted, free_at = admitted + 1, clock.now + 1 / 6
            throttle.answered(b"a", 200 if taken else 429)
    assert admitted > 0.5 * 6 * 60
    assert reached < 2 * PASSED * admitted


class Proxied:
    """A server that takes six a second of a flood, behind proxies that each know of what they passed themselves."""

    def __init__(self, proxies: int, seconds_long: float = 60) -> None:
        clock, source = Clock(), random.Random(proxies)
        throttles = [Throttle(clock) for _ in range(proxies)]
        free_at = clock.now
        self.reached = [0] * proxies
        self.admitted = 0
        self.turned_away_elsewhere = 0
        for number, _ in enumerate(seconds(clock, seconds_long, per_s=300)):
            proxy = source.randrange(proxies)
            if throttles[proxy].passes(b"a"):
                self.reached[proxy] += 1
                taken = clock.now >= free_at
                if taken:
                    self.admitted, free_at = self.admitted + 1, clock.now + 1 / 6
                throttles[proxy].answered(b"a", 200 if taken else 429)
            if number % 150 == 0:
                self.turned_away_elsewhere += not throttles[proxy].passes(b"b")
                throttles[proxy].answered(b"b", 429)


@pytest.mark.parametrize("proxies", [2, 4, 16])
def test_several_proxies_pass_at_most_as_many_times_what_one_does_and_all_of_them_some(proxies: int) -> None:
    one, several = Proxied(1), Proxied(proxies)
    assert sum(several.reached) < 1.2 * proxies * sum(one.reached)
    assert several.admitted > 0.9 * one.admitted, "what the server can take finds its way"
    assert min(several.reached) > 10, "whichever proxy a client is at, it is looked at in the end"
    assert several.turned_away_elsewhere == 0, "who sends little is passed by each"


def test_it_is_over_soon_after_the_flood() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    server = Server(throttle, one_in=10**9)
    for _ in seconds(clock, 10, per_s=500):
        server.asked()
    assert server.reached < 500
    clock.now += 4
    assert all(throttle.passes(b"a") for _ in range(20))


def test_tenants_that_are_seen_once_are_forgotten() -> None:
    throttle = Throttle(Clock())
    for number in range(5000):
        throttle.passes(str(number).encode())
    assert len(throttle._loads) <= 1024


class App:
    """Refuses all that is posted, as the API does."""

    def __init__(self, retry_after_s: float = 7) -> None:
        self.scopes: list[Scope] = []
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        error = as_api_error(RequestRefused("queue_full", "full", retry_after_s=self._retry_after_s))
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def asked(
    app: Any, method: str, headers: list[tuple[bytes, bytes]], path: str = "/v1/completions"
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads what is refused")

    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    start, body = sent
    return start["status"], {n.decode(): v.decode() for n, v in start["headers"]}, body["body"]


async def test_what_is_not_passed_is_told_so_in_the_shape_of_the_api() -> None:
    inner = App()
    app = Throttling(inner, Throttle(Clock()))
    answers = [await asked(app, "POST", [(b"authorization", b"Bearer x")]) for _ in range(300)]
    assert {status for status, _, _ in answers} == {429}
    assert {headers["retry-after"] for _, headers, _ in answers} == {"7"}, "as the server says"
    own = [json.loads(body)["error"] for _, _, body in answers if body]
    assert len(own) > 200
    assert len(own) + len(inner.scopes) == 300
    assert own[0].keys() == {"message", "type", "param", "code"}
    assert (own[0]["type"], own[0]["code"]) == ("rate_limit_error", "overloaded")
    reached = len(inner.scopes)
    await asked(app, "GET", [(b"authorization", b"Bearer x")])
    await asked(app, "POST", [(b"authorization", b"Bearer y")])
    assert len(inner.scopes) == reached + 2, "others are not concerned, nor is what is only looked at"


async def test_one_who_asks_for_what_nobody_can_keep_closes_the_door_on_nobody() -> None:
    """Without a key all are one tenant, and the server may be idle."""
    inner = App(retry_after_s=math.inf)
    app = Throttling(inner, Throttle(Clock()))
    for _ in range(300):
        status, headers, _ = await asked(app, "POST", [])
        assert status == 429
        assert headers["x-should-retry"] == "false"
        assert int(headers["retry-after"]) >= 1
    assert len(inner.scopes) == 300


@pytest.mark.parametrize("later", ["refused", "not answered"])
async def test_an_answer_that_takes_long_was_not_refused_if_later_ones_were(later: str) -> None:
    """What is not streamed begins when it ends: until then a flood's refusals were all that was known. But where all
    wait alike, refusals may just be slow."""
    throttle, ended, refusing = Throttle(Clock()), asyncio.Event(), App()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await ended.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await (refusing if scope["path"] == "refused" else slow)(scope, receive, send)

    app = Throttling(inner, throttle, patience_s=0.01)
    asking = [asyncio.create_task(asked(app, "POST", [])) for _ in range(20)]
    await asyncio.sleep(0)
    if later == "refused":
        await asked(app, "POST", [], "refused")
    await asyncio.sleep(0.1)
    tenant = hashlib.sha256(b"").digest()
    for _ in range(60):
        throttle.answered(tenant, 429)
    if later == "refused":
        assert all(throttle.passes(tenant) for _ in range(20)), "one in four is admitted"
    else:
        assert sum(throttle.passes(tenant) for _ in range(20)) < 5, "none is, as far as anybody knows"
    ended.set()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert throttle._load(tenant).admitted == 20, "each once"


async def test_who_keeps_a_body_back_is_not_to_send_it_as_a_next_request() -> None:
    app = Throttling(App(), Throttle(Clock()))
    for _ in range(50):
        await asked(app, "POST", [])
    _, headers, body = await asked(app, "POST", [(b"expect", b"100-continue")])
    assert json.loads(body)["error"]["code"] == "overloaded"
    assert headers["connection"] == "close"
    _, headers, _ = await asked(app, "POST", [])
    assert "connection" not in headers


async def test_arrivals_are_noted_whatever_a_client_says() -> None:
    inner = App()
    await asked(Arrival(inner), "POST", [(HEADER.upper().encode(), b"1"), (b"other", b"kept")])
    (scope,) = inner.scopes
    noted = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
    assert len(scope["headers"]) == 2
    assert noted["other"] == "kept"
    assert 0 < seconds_on_its_way(noted) < 5
    machine, moment = noted[HEADER].split(" ")
    assert seconds_on_its_way({HEADER: f"{machine} {float(moment) - 5}"}) > 5
    assert seconds_on_its_way({HEADER: f"another {float(moment) - 5}"}) == 0, "whose clock is another"


@pytest.mark.parametrize("said", ["", "soon", "nan", "inf", "-inf", "-1", "9" * 40, "1e400"])
async def test_a_time_that_cannot_be_is_none(said: str) -> None:
    inner = App()
    await asked(Arrival(inner), "POST", [])
    machine = inner.scopes[0]["headers"][0][1].decode().split(" ")[0]
    assert seconds_on_its_way({HEADER: said}) == 0.0
    assert seconds_on_its_way({HEADER: f"{machine} {said}"}) == 0.0
    assert LONGEST_S < 60
