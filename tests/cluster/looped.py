"""A loop under test, read by requests and closed."""

from __future__ import annotations

import asyncio

from cluster.loop import IterationLoop
from cluster.mailbox import Mailboxes
from scheduler.request import Delta, Request


class Looped:
    mailboxes: Mailboxes
    loop: IterationLoop
    task: asyncio.Task[None]

    async def generate(self, request: Request) -> tuple[list[int], Delta]:
        self.mailboxes.open(request.request_id)
        self.loop.add(request)
        tokens: list[int] = []
        async for delta in self.mailboxes.read(request.request_id, self.loop.abort):
            tokens.extend(delta.tokens)
        return tokens, delta

    async def close(self) -> None:
        self.loop.close()
        await asyncio.wait_for(self.task, 5)
