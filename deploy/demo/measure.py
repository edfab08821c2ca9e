"""One phase: streams that decode, then one long prompt into them, and when each token came. Over HTTP, as a client."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.demo.record import PhaseRecord, StreamRecord
from deploy.errors import CommandError

LEAD_TOKENS = 20
"""Each stream has this many tokens before the long prompt is sent: the undisturbed pace, to compare with."""
TAIL_TOKENS = 24
LONG_ANSWER = 12


@dataclass(frozen=True, slots=True)
class Load:
    """`prompts` of the streams and the `long` one, as token ids; `tokens` that each stream may generate. It ends
    TAIL_TOKENS after the long request, so how long a policy takes does not cut it short."""

    prompts: tuple[tuple[int, ...], ...]
    long: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Progress:
    """Of one streamed request while it runs; `led` is set once it has had its undisturbed tokens, and `enough` is the
    number of tokens at which its reader goes away."""

    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    led: asyncio.Event = field(default_factory=asyncio.Event)
    enough: int | None = None

    def record(self, origin: float) -> StreamRecord:
        return StreamRecord(self.sent - origin, tuple(token - origin for token in self.tokens))


async def run_phase(url: str, model: str, load: Load, policy: str, chunk_size: int | None) -> PhaseRecord:
    """Raises CommandError where the server refuses or ends a request early."""
    streams, long = [Progress() for _ in load.prompts], Progress()
    async with _client(url) as client:
        running = [
            asyncio.create_task(_generate(client, model, prompt, load.tokens, stream))
            for prompt, stream in zip(load.prompts, streams, strict=True)
        ]
        try:
            await _all_led(streams, running)
            await _generate(client, model, load.long, LONG_ANSWER, long)
            for stream in streams:
                stream.enough = len(stream.tokens) + TAIL_TOKENS
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
    origin = min(stream.sent for stream in streams)
    return PhaseRecord(
        policy=policy,
        chunk_size=chunk_size,
        streams=tuple(stream.record(origin) for stream in streams),
        long=long.record(origin),
        long_tokens=len(load.long),
    )


async def warm_up(url: str, model: str, prompt: Sequence[int]) -> None:
    """First calls compile and allocate; that is not what the phases are to show."""
    async with _client(url) as client:
        await _generate(client, model, prompt, 4, Progress())


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300), limits=limits, trust_env=False)


async def _all_led(streams: list[Progress], running: list[asyncio.Task[None]]) -> None:
    led = asyncio.create_task(_wait_for_each(streams))
    await asyncio.wait([led, *running], return_when=asyncio.FIRST_COMPLETED)
    led.cancel()
    for task in running:
        if task.done():
            await task  # raises what went wrong; a stream that has ended already was too short to show anything
            raise CommandError("a stream ended before the long prompt was sent; the model's context is too short")


async def _wait_for_each(streams: list[Progress]) -> None:
    for stream in streams:
        await stream.led.wait()


async def _generate(client: httpx.AsyncClient, model: str, prompt: Sequence[int], tokens: int, seen: Progress) -> None:
    """Stream one completion and note the time of each token. Tokens are counted by usage: a chunk may carry several,
    and a token may have no text."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": uuid.uuid4().hex,  # each phase is to compute the same
    }
    seen.sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise CommandError(f"the server refused a request: {_message(await response.aread())}")
        async for line in response.aiter_lines():
            note(line, seen)
            if seen.enough is not None and len(seen.tokens) >= seen.enough:
                return
    if len(seen.tokens) < tokens:
        raise CommandError(f"the server sent {len(seen.tokens)} of {tokens} tokens")


def note(line: str, seen: Progress) -> None:
    """Take in one line of an event stream. Raises CommandError for an error in it."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    event: dict[str, Any] = json.loads(line.removeprefix("data:"))
    if error := event.get("error"):
        raise CommandError(f"the server ended a stream: {error.get('message', error)}")
    counted = (event.get("usage") or {}).get("completion_tokens", len(seen.tokens))
    now = time.perf_counter()
    seen.tokens.extend([now] * (counted - len(seen.tokens)))
    if len(seen.tokens) >= LEAD_TOKENS:
        seen.led.set()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
