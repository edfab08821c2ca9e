"""Plans by Unix sockets, for ranks on the scheduler's machine: a rank that waits sleeps in the kernel, and a message
takes two system calls instead of an actor call's way through Ray (docs/performance.md has what that is worth).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from ray.actor import ActorHandle

from cluster.frames import FrameProtocol, listening
from cluster.recovery import hear

CONNECT_S = 30.0
ASKED_WHY_S = 10.0
"""So long a rank has time to say why it hung up."""


class SocketTransport:
    """One socket a rank. A rank's own errors come by the call in which it serves its socket."""

    name: ClassVar[str] = "socket"

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines

    @classmethod
    async def open(cls, ranks: Sequence[ActorHandle[Any]]) -> SocketTransport:
        """Raises ConnectionError where a rank does not come to its socket, and what Ray raises for one that is dead."""
        lines = list(map(_Line, ranks))
        opening = [asyncio.ensure_future(line.open()) for line in lines]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)  # none of them is to be connected later
            for line in lines:
                line.close()
            raise
        return cls(lines)

    async def send(self, plan: bytes) -> bytes:
        answers = await asyncio.gather(*[line.ask(plan) for line in self._lines])
        return answers[0]

    async def close(self) -> None:
        for line in self._lines:
            line.close()


class _Line:
    """To one rank, which answers in the order in which it is asked."""

    def __init__(self, rank: ActorHandle[Any]) -> None:
        self._rank = rank
        self._end = FrameProtocol(self._heard, self._hung_up)
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._serving: asyncio.Future[None] | None = None

    async def open(self) -> None:
        async with listening(self._end) as path:
            self._serving = asyncio.ensure_future(self._rank.serve.remote(path))
            self._serving.add_done_callback(hear)
            coming = asyncio.ensure_future(self._end.connected.wait())
            await asyncio.wait({coming, self._serving}, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise await self._why()

    def ask(self, plan: bytes) -> asyncio.Future[bytes]:
        """Its answer; or, where it does not answer any more, why."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        try:
            self._end.send(plan)
        except ConnectionError:
            self._hung_up(None)
        return answer

    def close(self) -> None:
        self._end.close()

    def _heard(self, message: bytes) -> None:
        answer = self._waiting.popleft()
        if not answer.done():  # nobody may wait for it any more
            answer.set_result(message)

    def _hung_up(self, _: Exception | None) -> None:
        answers, self._waiting = self._waiting, deque()

        def tell(why: asyncio.Future[Exception]) -> None:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(why.result())

        if answers:
            asyncio.ensure_future(self._why()).add_done_callback(tell)

    async def _why(self) -> Exception:
        assert self._serving is not None  # it was opened
        try:
            await asyncio.wait_for(asyncio.shield(self._serving), ASKED_WHY_S)
        except TimeoutError:
            return ConnectionError("a rank has hung up without a reason")
        except Exception as error:
            return error
        return ConnectionError("a rank has left its socket")
