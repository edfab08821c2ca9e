"""Where deltas wait for the consumer of their request: one box a request, bounded by what the request may generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from cluster.engine import EngineUnavailable
from scheduler.errors import RequestRefused
from scheduler.request import Delta

Letter = Delta | RequestRefused | EngineUnavailable


class Mailboxes:
    """Delivers each delta to its request's consumer, on one event loop."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Queue[Letter]] = {}

    def open(self, request_id: str) -> None:
        """Raises RequestRefused where a request of that id is being consumed already."""
        if request_id in self._boxes:
            raise RequestRefused("duplicate_request", f"request {request_id!r} is running already")
        self._boxes[request_id] = asyncio.Queue()

    def close(self, request_id: str) -> None:
        self._boxes.pop(request_id, None)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Deltas of requests that nobody consumes any more are dropped."""
        for delta in deltas:
            self.post(delta.request_id, delta)

    def post(self, request_id: str, letter: Letter) -> None:
        box = self._boxes.get(request_id)
        if box is not None:
            box.put_nowait(letter)

    def fail_all(self, reason: str) -> None:
        """End every consumer with EngineUnavailable."""
        for box in self._boxes.values():
            box.put_nowait(EngineUnavailable(reason))

    async def read(self, request_id: str, abort: Callable[[str], None]) -> AsyncGenerator[Delta]:
        """Deltas of an opened box until one that finishes; a consumer that stops before that aborts the request."""
        box = self._boxes[request_id]
        finished = False
        try:
            while not finished:
                letter = await box.get()
                if not isinstance(letter, Delta):
                    finished = True
                    raise letter
                finished = letter.finish is not None
                yield letter
        finally:
            self.close(request_id)
            if not finished:
                abort(request_id)
