"""Who hears of which request: one message an iteration and subscriber, by its line where it has one; where it polls,
merged while it is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.token_line import TokenLine
from scheduler.request import Delta

SILENCE_S = 6.0
"""A subscriber that has not polled for so long is taken for dead; it polls every few seconds even when nothing happens.
One that was merely slow subscribes again, and its requests go on from what it has seen."""


class Unsubscribed(Exception):
    """Nothing is known of this subscriber: it was taken for dead, or the scheduler is a new one."""


@dataclass
class Subscriber:
    requests: set[str] = field(default_factory=set)
    waiting: list[Delta] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at: float = field(default_factory=time.monotonic)
    polling: int = 0
    line: TokenLine | None = None


class Subscribers:
    """On one event loop. What waits for a subscriber is bounded by what its requests may generate."""

    def __init__(self, encode: Callable[[Iterable[Delta]], bytes]) -> None:
        self._encode = encode
        self._subscribers: dict[str, Subscriber] = {}
        self._owners: dict[str, str] = {}
        self.messages = 0

    def __len__(self) -> int:
        return len(self._subscribers)

    def add(self, name: str) -> None:
        self._subscribers.setdefault(name, Subscriber())

    def check(self, name: str) -> None:
        """Raises Unsubscribed."""
        self._get(name)

    def owns(self, name: str, request_id: str) -> None:
        """Raises Unsubscribed."""
        self._get(name).requests.add(request_id)
        self._owners[request_id] = name

    async def line(self, name: str, lost: Callable[[], None]) -> str:
        """A path at which a subscriber that has no requests yet can have its tokens from then on, instead of by polls.
        `lost` is called where it did so and is gone. Raises Unsubscribed, and OSError."""
        line = self._get(name).line = TokenLine(lost)
        return await line.listen()

    def publish(self, deltas: Iterable[Delta]) -> None:
        with_news: dict[str, Subscriber] = {}
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            subscriber = self._subscribers.get(owner) if owner is not None else None
            if subscriber is not None and owner is not None:
                subscriber.waiting.append(delta)
                with_news[owner] = subscriber
            if delta.finish is not None:
                self._owners.pop(delta.request_id, None)
                if subscriber is not None:
                    subscriber.requests.discard(delta.request_id)
        for subscriber in with_news.values():
            if subscriber.line is not None and subscriber.line.connected:
                subscriber.line.send(self._message(subscriber))
            else:
                subscriber.news.set()

    def wake(self) -> None:
        """Let every poll return now."""
        for subscriber in self._subscribers.values():
            subscriber.news.set()

    async def poll(self, name: str, timeout_s: float) -> bytes:
        """Encoded deltas; nothing where none came in time, and where the poll was to return. Raises Unsubscribed."""
        subscriber = self._get(name)
        subscriber.polling += 1
        try:
            await asyncio.wait_for(subscriber.news.wait(), timeout_s)
        except TimeoutError:
            return b""
        finally:
            subscriber.polling -= 1
            subscriber.heard_at = time.monotonic()
        subscriber.news.clear()
        return self._message(subscriber) if subscriber.waiting else b""

    def silent(self) -> list[str]:
        """Subscribers taken for dead."""
        since = time.monotonic() - SILENCE_S
        return [name for name, s in self._subscribers.items() if s.polling == 0 and s.heard_at < since]

    def remove(self, name: str) -> list[str]:
        """Forget a subscriber. Returns its requests, which nobody will hear of."""
        subscriber = self._subscribers.pop(name, None)
        if subscriber is None:
            return []
        for request_id in subscriber.requests:
            self._owners.pop(request_id, None)
        if subscriber.line is not None:
            subscriber.line.close()
        return sorted(subscriber.requests)

    def hang_up(self) -> None:
        """Of every line: who is at its other end is to subscribe again."""
        for subscriber in self._subscribers.values():
            if subscriber.line is not None:
                subscriber.line.close()

    def _message(self, subscriber: Subscriber) -> bytes:
        """What waits for a subscriber, encoded."""
        deltas, subscriber.waiting = subscriber.waiting, []
        self.messages += 1
        return self._encode(deltas)

    def _get(self, name: str) -> Subscriber:
        try:
            return self._subscribers[name]
        except KeyError:
            raise Unsubscribed(name) from None
