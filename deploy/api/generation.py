"""All sequences of one HTTP request, generated together. Whatever ends it early, the engine is told at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from cluster.engine import Engine
from scheduler.request import Delta, Request

Event = tuple[int, Delta]


async def generate_all(engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[Event]:
    """(index of the request, its delta) in the order in which they come, until every request has finished.

    Raises what `Engine.generate` raises, for whichever request it does; closing it aborts those that still run.
    """
    if len(requests) == 1:
        async with aclosing(_generate(engine, requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(engine, index, request, events)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            event = await events.get()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(engine: Engine, index: int, request: Request, events: asyncio.Queue[Any]) -> None:
    try:
        async with aclosing(_generate(engine, request)) as deltas:
            async for delta in deltas:
                events.put_nowait((index, delta))
        events.put_nowait(None)
    except Exception as error:
        events.put_nowait(error)


async def _generate(engine: Engine, request: Request) -> AsyncGenerator[Delta]:
    """The engine's deltas. Its own iterator aborts too when it is closed, but only once somebody gets to close it."""
    finished = False
    deltas = engine.generate(request)
    try:
        async for delta in deltas:
            finished = delta.finish is not None
            yield delta
    except Exception:
        finished = True
        raise
    finally:
        if not finished:
            engine.abort(request.request_id)
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()
