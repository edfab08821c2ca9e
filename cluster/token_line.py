"""New tokens from the scheduler to a front end of the same machine, by a Unix socket: each message is one iteration's.

A poll costs an actor call there and back for each iteration, on both sides and on processors that forwards compute on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cluster.frames import FrameProtocol, listening

CONNECT_S = 10.0
GREETING = b""
"""The first message. Who has heard it knows that whatever is new comes this way, and none of it by a poll."""


class TokenLine:
    """The scheduler's end. `lost` is called, once, when a front end that was connected is so no more."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._end = FrameProtocol(lambda message: None, lambda cause: lost())
        self._listening: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._end.connected.is_set()

    async def listen(self) -> str:
        """A path at which a front end can connect within `CONNECT_S`. Raises OSError."""
        path: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen(path))
        return await path

    async def _listen(self, path: asyncio.Future[str]) -> None:
        try:
            async with listening(self._end) as at:
                path.set_result(at)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._end.connected.wait(), CONNECT_S)
                    self._end.send(GREETING)
        except OSError as error:
            if not path.done():  # or else it hung up before it was greeted, and `lost` was called
                path.set_exception(error)

    def send(self, message: bytes) -> None:
        """To nobody, where it is gone: `lost` is called for that."""
        with suppress(ConnectionError):
            self._end.send(message)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
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
        try:
            await asyncio.wait_for(self._greeted.wait(), CONNECT_S)
        except TimeoutError:
            self.close()
            raise

    def close(self) -> None:
        """Nothing is heard from then on."""
        self._heard = lambda message: None
        self._end.close()

    def _hear(self, message: bytes) -> None:
        if self._greeted.is_set():
            self._heard(message)
        self._greeted.set()
