"""Who hears of what, and what becomes of those who do not ask any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from cluster.subscribers import SILENCE_S, Subscribers, Unsubscribed
from cluster.token_line import TokenEar
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


async def test_who_has_a_line_hears_by_it_and_not_by_polls() -> None:
    subscribers = Subscribers(names)
    subscribers.add("a")
    subscribers.add("polls")
    lost = asyncio.Event()
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    ear = TokenEar(heard.put_nowait)
    await ear.connect(await subscribers.line("a", lost.set))
    subscribers.owns("a", "a1")
    subscribers.owns("polls", "p1")
    subscribers.publish([Delta("a1", (1,)), Delta("p1", (1,)), Delta("a1", (2,))])
    subscribers.publish([Delta("a1", finish=Finish.STOP)])
    assert [await heard.get(), await heard.get()] == [b"a1 a1", b"a1"], "one message an iteration"
    assert await subscribers.poll("a", 0.01) == b""
    assert await subscribers.poll("polls", 1) == b"p1"
    assert subscribers.messages == 3
    assert not lost.is_set()
    ear.close()
    await lost.wait()
    subscribers.publish([Delta("a1", (3,))])  # to nobody


async def test_a_line_ends_with_its_subscription() -> None:
    subscribers = Subscribers(names)
    ears = []
    for name in ("removed", "hung up"):
        subscribers.add(name)
        ears.append(TokenEar(lambda message: None))
        await ears[-1].connect(await subscribers.line(name, lambda: None))
    subscribers.remove("removed")
    await ears[0].lost.wait()
    assert not ears[1].lost.is_set()
    subscribers.hang_up()
    await ears[1].lost.wait()


async def test_nobody_can_come_to_a_line_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.token_line.CONNECT_S", 0.01)
    subscribers = Subscribers(names)
    subscribers.add("a")
    path = await subscribers.line("a", lambda: None)
    while await asyncio.to_thread(Path(path).exists):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    with pytest.raises(FileNotFoundError):
        await TokenEar(lambda message: None).connect(path)
    subscribers.owns("a", "a1")
    subscribers.publish([Delta("a1", (1,))])
    assert await subscribers.poll("a", 1) == b"a1", "it still has its polls"


async def test_a_line_that_ends_before_it_is_greeted_is_told_at_once(tmp_path: Path) -> None:
    ends: list[asyncio.BaseTransport] = []

    class HangsUp(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            ends.append(transport)
            transport.close()

    await asyncio.get_running_loop().create_unix_server(HangsUp, tmp_path / "s")
    with pytest.raises(ConnectionError, match="nothing was said"):
        await asyncio.wait_for(TokenEar(lambda message: None).connect(str(tmp_path / "s")), 5)


async def test_a_line_that_is_closed_while_it_is_made_is_left_to_nobody() -> None:
    subscribers = Subscribers(names)
    for turns in range(6):
        subscribers.add("a")
        making = asyncio.create_task(subscribers.line("a", lambda: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        subscribers.remove("a")
        try:
            path = await asyncio.wait_for(making, 5)
        except Unsubscribed:
            continue
        while await asyncio.to_thread(Path(path).exists):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
