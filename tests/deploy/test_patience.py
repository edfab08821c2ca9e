"""One timer for all that an answer sends: only what is not taken in for so long ends it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from deploy.api.patience import Patience, ReaderStalled

SECONDS = 0.1
BODY: Message = {"type": "http.response.body", "body": b"x", "more_body": True}


async def test_many_quick_ones_take_longer_together_than_one_may() -> None:
    taken = []

    async def send(message: Message) -> None:
        taken.append(message)
        await asyncio.sleep(SECONDS / 10)

    async with Patience(send, SECONDS) as patience:
        for _ in range(30):
            await patience.send(BODY)
        await asyncio.sleep(3 * SECONDS)  # for the engine: nothing is on its way to the client
        await patience.send(BODY)
    assert len(taken) == 31


async def test_one_that_is_not_taken_in_ends_it_after_any_number_that_were() -> None:
    taken = []

    async def send(message: Message) -> None:
        taken.append(message)
        await (asyncio.sleep(SECONDS / 10) if len(taken) < 20 else asyncio.Event().wait())

    async def sending() -> None:
        async with Patience(send, SECONDS) as patience:
            while True:
                await patience.send(BODY)

    with pytest.raises(ReaderStalled):
        await sending()
    assert len(taken) == 20


async def test_what_sending_raises_is_raised_and_nothing_waits_after_it() -> None:
    async def send(message: Message) -> None:
        raise OSError("gone")

    async with Patience(send, SECONDS) as patience:
        with pytest.raises(OSError, match="gone"):
            await patience.send(BODY)
        await asyncio.sleep(3 * SECONDS)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    async def sending() -> None:
        async with Patience(send, 60.0) as patience:
            await patience.send(BODY)

    task = asyncio.create_task(sending())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
