"""How long a client may take in nothing of what is sent to it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Message, Send


class ReaderStalled(Exception):
    """The client is connected and reads nothing."""


class Patience:
    """A server lets `send` wait while more is on the way than its buffers hold: within this scope, for `seconds` at
    most. Raises ReaderStalled when that takes so long, from the scope and not from `send`.

    One timer does for all that is sent, moved on when it fires: one for each token would be a tenth of what a token
    costs here.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    async def send(self, message: Message) -> None:
        self._since = self._loop.time()
        try:
            await self._send(message)
        finally:
            self._since = None

    async def __aenter__(self) -> Patience:
        await self._limit.__aenter__()
        self._look_at(self._loop.time() + self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ReaderStalled from None

    def _look_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        end = (now if self._since is None else self._since) + self._seconds
        if end <= now:
            self._limit.reschedule(now)
        else:
            self._look_at(end)
