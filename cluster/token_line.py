"""New tokens from the scheduler to a front end of the same machine, by a Unix socket: each message is one iteration's.

A poll costs an actor call there and back for each iteration, on both sides and on processors that forwards compute on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from cluster.frames import FrameProtocol, listening

CONNECT_S = 10.0
GREETING = b""
"""The first message. Who has heard it knows that whatever is new comes this way, and none of it by a poll."""


class TokenLine:
    """The scheduler's end. `lost` is called, once, when a front end that was connected is so no more."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._end = FrameProtocol(lambda message: None, lambda cause: lost())
        self._closed = asyncio.Event()
        self._greeting: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._end.connected.is_set()

    async def listen(self) -> str:
        """A path at which a front end can connect within `CONNECT_S`. Raises OSError."""
        listens = AsyncExitStack()
        path = await listens.enter_async_context(listening(self._end))
        self._greeting = asyncio.create_task(self._greet(listens))
        return path

    async def _greet(self, listens: AsyncExitStack) -> None:
        async with listens:
            await _either(self._end.connected, self._closed)
            if self.connected and not self._closed.is_set():
                self.send(GREETING)
        if self._closed.is_set():  # while somebody was coming
            self._end.close()

    def send(self, message: bytes) -> None:
        """To nobody, where it is gone: `lost` is called for that."""
        with suppress(ConnectionError):
            self._end.send(message)

    def close(self) -> None:
        self._closed.set()
        self._end.close()


class TokenEar:
    """A front end's end."""

    def __init__(self, heard: Callable[[bytes], None]) -> None:
        self._greeted = asyncio.Event()
        self._heard = heard
        self._end = FrameProtocol(self._hear, lambda cause: self.lost.set())
        self.lost = asyncio.Event()

    async def connect(self, path: str) -> None:
        """Returns once everything comes this way. Raises OSError where nobody listens there, or says nothing."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._end, path)
        await _either(self._greeted, self.lost)
        if not self._greeted.is_set():
            self.close()
            raise ConnectionError("nothing was said")

    def close(self) -> None:
        """Nothing is heard from then on."""
        self._heard = lambda message: None
        self._end.close()

    def _hear(self, message: bytes) -> None:
        if self._greeted.is_set():
            self._heard(message)
        self._greeted.set()


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    """Until one of them, or `CONNECT_S`."""
    waiting = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(waiting, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
