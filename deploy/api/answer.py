"""From a job to an HTTP answer, streamed or whole. Whoever goes away takes the work with them, at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.engine import Engine
from deploy.api.choice import Choice, Piece, join
from deploy.api.errors import ApiError, as_api_error
from deploy.api.formats import Format, JsonObject, usage_of
from deploy.api.generation import generate_all
from deploy.api.patience import Patience, ReaderStalled
from deploy.api.schemas import Sampling
from deploy.api.settings import ApiSettings
from deploy.api.slo import GRANTED_HEADER, described
from scheduler.slo import Grant

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Generates when it is sent, not before, so that the client's leaving is listened for all the while."""

    def __init__(
        self,
        engine: Engine,
        format: Format,
        choices: list[Choice],
        body: Sampling,
        settings: ApiSettings,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._format = format
        self._choices = choices
        self._settings = settings
        self._stream = body.stream
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._timeout_s = settings.request_timeout_s
        self._grant: Grant | None = None
        self._grant_told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what went wrong as long as nothing has been sent; after that it is the stream's last event."""
        try:
            await until_disconnected(receive, self._send_all(send))
        except ReaderStalled:
            logger.warning("request %s was ended: its client has stopped reading", self._format.job.id)

    async def _send_all(self, send: Send) -> None:
        async with Patience(send, self._settings.send_timeout_s) as patience:
            await (self._send_stream(patience.send) if self._stream else self._send_whole(patience.send))

    async def _send_whole(self, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async with aclosing(self._pieces()) as arriving:
            async for index, piece in arriving:
                pieces[index].append(piece)
        answer = self._format.response([join(parts) for parts in pieces], self._usage())
        body = json.dumps(self._with_grant(answer), ensure_ascii=False).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._grant_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        started = False
        async with aclosing(self._events()) as events:
            try:
                async for event in events:
                    if not started:
                        started = True
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": [*_STREAM_HEADERS, *self._grant_headers()],
                            }
                        )
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                if not started:
                    raise
                last = _event(as_api_error(error, self._settings.retry_after_s).body) + _DONE
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncGenerator[bytes]:
        """What comes of each of the engine's deltas at once: the bytes of one event or of several."""
        opened = [False] * len(self._choices)
        waiting: list[list[Piece]] = [[] for _ in self._choices]
        async with aclosing(self._pieces()) as arriving:
            async for index, piece in arriving:
                waiting[index].append(piece)
                if not self._worth_an_event(piece):
                    continue
                choices = [] if opened[index] else self._format.opening(index)
                choices.append(self._format.delta(index, join(waiting[index]), first=not opened[index]))
                opened[index] = True
                waiting[index].clear()
                yield b"".join(self._chunk([choice]) for choice in choices)
        if self._usage_at_end:
            yield _event({**self._format.chunk([]), "usage": self._usage()})
        yield _DONE

    def _worth_an_event(self, piece: Piece) -> bool:
        """A token without text of its own (half a character, perhaps a stop string) waits for the next, unless the
        client counts token ids."""
        return bool(piece.text or piece.finish_reason or (self._format.with_token_ids and piece.token_ids))

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """Until every choice is finished: by the engine, or by a stop string, of which the engine is told here."""
        requests = self._format.job.requests
        async with aclosing(generate_all(self._engine, requests)) as deltas:
            in_time = deltas if self._timeout_s is None else _within(self._timeout_s, deltas)
            async for index, delta in in_time:
                if delta.grant is not None:
                    self._grant = delta.grant
                choice = self._choices[index]
                if choice.finished or delta.grant is not None:
                    continue
                piece = choice.take(delta)
                if choice.finished and delta.finish is None:
                    self._engine.abort(requests[index].request_id, stopped=True)
                yield index, piece
                if all(choice.finished for choice in self._choices):
                    return

    def _grant_headers(self) -> list[tuple[bytes, bytes]]:
        """What was promised instead, where the promise could not be given as it was asked for."""
        if self._grant is None:
            return []
        return [(GRANTED_HEADER.encode(), json.dumps(described(self._grant)).encode())]

    def _with_grant(self, answer: JsonObject) -> JsonObject:
        """In the answer, or in the first event of a stream."""
        if self._grant is None or self._grant_told:
            return answer
        self._grant_told = True
        return {**answer, "slo": described(self._grant)}

    def _chunk(self, choices: list[JsonObject]) -> bytes:
        chunk = self._with_grant(self._format.chunk(choices))
        if self._usage_always:
            chunk["usage"] = self._usage()
        elif self._usage_at_end:
            chunk["usage"] = None
        return _event(chunk)

    def _usage(self) -> JsonObject:
        return usage_of(self._format.job, self._choices)


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client goes away or this is cancelled. Returns after it has ended."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        listening.cancel()
        working.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _within(seconds: float, source: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[tuple[int, Any]]:
    """The items of `source`, all of them within so many seconds. Raises ApiError."""
    end = asyncio.get_running_loop().time() + seconds
    try:
        while True:
            async with asyncio.timeout_at(end):
                item = await anext(source)
            yield item
    except StopAsyncIteration:
        return
    except TimeoutError:
        raise ApiError(504, f"the request took longer than {seconds:g} s", code="request_timeout") from None


def _event(data: JsonObject) -> bytes:
    """Everything but ASCII is escaped: some clients split lines at characters that JSON may hold as they are."""
    return f"data: {_encoded(data)}\n\n".encode()


_encoded = json.JSONEncoder(separators=(",", ":")).encode
_DONE = b"data: [DONE]\n\n"
