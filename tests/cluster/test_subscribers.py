"""Who hears of what, and what becomes of those who do not ask any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from cluster.subscribers import SILENCE_S, Subscribers, Unsubscribed
from scheduler.request import Delta, Finish


def names(deltas: Iterable[Delta]) -> bytes:
    return " ".join(delta.request_id for delta in deltas).encode()


async def test_each_hears_of_its_own_requests_once() -> None:
    subscribers = Subscribers(names)
    for name in ("a", "b"):
        subscribers.add(name)
        subscribers.owns(name, f"{name}1")
    subscribers.publish([Delta("a1", (1,)), Delta("b1", (1,)), Delta("nobody's", (1,)), Delta("a1", (2,))])
    assert await subscribers.poll("a", 1) == b"a1 a1"
    assert await subscribers.poll("b", 1) == b"b1"
    assert await subscribers.poll("a", 0.01) == b""
    assert subscribers.messages == 2


async def test_who_is_not_known_is_told_so() -> None:
    subscribers = Subscribers(names)
    with pytest.raises(Unsubscribed):
        await subscribers.poll("a", 1)
    with pytest.raises(Unsubscribed):
        subscribers.owns("a", "a1")
    subscribers.add("a")
    subscribers.owns("a", "a1")
    assert subscribers.remove("a") == ["a1"]
    assert subscribers.remove("a") == []
    with pytest.raises(Unsubscribed):
        subscribers.check("a")
    subscribers.add("later")
    subscribers.owns("later", "a1")
    subscribers.publish([Delta("a1", finish=Finish.STOP)])
    assert await subscribers.poll("later", 1) == b"a1"


async def test_silence_is_noticed_but_not_that_of_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    subscribers = Subscribers(names)
    subscribers.add("gone")
    subscribers.add("waits")
    waiting = asyncio.create_task(subscribers.poll("waits", 10))
    await asyncio.sleep(0)
    assert subscribers.silent() == []
    later = time.monotonic() + SILENCE_S + 1
    monkeypatch.setattr("cluster.subscribers.time.monotonic", lambda: later)
    assert subscribers.silent() == ["gone"]
    monkeypatch.undo()
    waiting.cancel()
