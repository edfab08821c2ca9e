"""What a stream's events are, when they come, and how they end. Tokens are scripted, so that each has its moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deploy.api import create_api
from scheduler.request import Delta, Finish, Request
from tests.deploy.conftest import in_process, served
from tests.deploy.scripted import ScriptedEngine, saying
from tests.deploy.wire import JsonObject, events, finishes, text_of
from workers.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, JsonObject] = {
    COMPLETIONS: {"model": "scripted", "prompt": "Hello"},
    CHAT: {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]},
}


async def stream(api: FastAPI, path: str, **fields: Any) -> list[JsonObject]:
    async with in_process(api) as client:
        response = await client.post(path, json={**BODIES[path], "stream": True, **fields})
        assert response.status_code == 200, response.text
        return events(response.text)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_one_finish_reason_then_usage_then_done(tokenizer: Tokenizer, path: str) -> None:
    """Case 15; `events` has checked [DONE]."""
    tokens = tokenizer.encode("one two three")
    api = create_api(ScriptedEngine(saying(tokens)), tokenizer)
    plain = await stream(api, path, n=3)
    assert all("usage" not in event for event in plain)
    with_usage = await stream(api, path, n=3, stream_options={"include_usage": True})
    *parts, last = with_usage
    for streamed in (plain, parts):
        assert [finishes(streamed, index) for index in range(3)] == [["length"]] * 3
        assert all(len(event["choices"]) == 1 for event in streamed)
        assert len({event["id"] for event in streamed}) == 1
    assert all(event["usage"] is None for event in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3 * len(tokens)
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3 * len(tokens)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_first_token_is_sent_at_once_and_nothing_before_it(tokenizer: Tokenizer, path: str) -> None:
    """Case 14, over a real connection: the second token comes only after the client has seen the first."""
    first, second = tokenizer.encode(" one two")
    may_begin, may_go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> AsyncGenerator[Delta]:
        await may_begin.wait()
        yield Delta(request.request_id, (first,))
        await may_go_on.wait()
        yield Delta(request.request_id, (second,), finish=Finish.LENGTH)

    api = create_api(ScriptedEngine(script), tokenizer)
    async with served(api) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {**BODIES[path], "stream": True}
        asking = asyncio.create_task(client.send(client.build_request("POST", path, json=body), stream=True))
        await asyncio.sleep(0.2)
        assert not asking.done(), "a stream that has no token yet must not look as if it had begun"
        may_begin.set()
        response = await asking
        lines = response.aiter_lines()
        received = [await next_event(lines)]
        if path == CHAT:
            assert received[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            received.append(await next_event(lines))
        assert text_of(received) == " one"
        may_go_on.set()
        received.append(await next_event(lines))
        assert text_of(received) == " one two"
        await response.aclose()


async def next_event(lines: AsyncIterator[str]) -> JsonObject:
    async for line in lines:
        if line.startswith("data: "):
            event: JsonObject = json.loads(line.removeprefix("data: "))
            return event
    raise AssertionError("the stream ended")


async def test_tokens_are_counted_not_events(tokenizer: Tokenizer) -> None:
    """Case 16: an emoji is several tokens and one piece of text."""
    tokens = tokenizer.encode("🎉 🎉")
    assert len(tokens) > 4
    api = create_api(ScriptedEngine(saying(tokens)), tokenizer)
    streamed = await stream(api, COMPLETIONS, stream_options={"continuous_usage_stats": True, "include_usage": True})
    counted = [event["usage"]["completion_tokens"] for event in streamed]
    assert len(streamed) < len(tokens)
    assert counted == sorted(counted)
    assert counted[-1] == len(tokens)
    assert all(event["choices"][0]["text"] for event in streamed[:-1]), "no event without text"


async def test_token_ids_come_with_every_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🎉 🎉")
    api = create_api(ScriptedEngine(saying(tokens)), tokenizer)
    for path in (COMPLETIONS, CHAT):
        streamed = await stream(api, path, return_token_ids=True)
        choices = [event["choices"][0] for event in streamed]
        assert [ids for choice in choices if (ids := choice.get("token_ids"))] == [[token] for token in tokens]
        assert text_of(streamed) == "🎉 🎉"


async def test_a_delta_of_several_tokens_is_cut_at_the_stop(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four")

    async def script(request: Request) -> AsyncGenerator[Delta]:
        yield Delta(request.request_id, tuple(tokens), finish=Finish.LENGTH)

    api = create_api(ScriptedEngine(script), tokenizer)
    streamed = await stream(api, COMPLETIONS, stop=" three", stream_options={"include_usage": True})
    assert text_of(streamed) == "one two"
    assert finishes(streamed) == ["stop"]
    assert streamed[-1]["usage"]["completion_tokens"] == 3


async def test_a_stop_string_ends_the_request_at_the_engine_and_no_other(tokenizer: Tokenizer) -> None:
    texts = {0: "stop here and not there", 1: "go on for ever and ever"}

    async def script(request: Request) -> AsyncGenerator[Delta]:
        tokens = tokenizer.encode(texts[request.sampling.choice])
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            yield Delta(request.request_id, (token,), finish=Finish.LENGTH if last else None)
            await asyncio.sleep(0)

    engine = ScriptedEngine(script)
    streamed = await stream(create_api(engine, tokenizer), COMPLETIONS, n=2, stop=" here", max_tokens=30)
    assert [text_of(streamed, index) for index in range(2)] == ["stop", texts[1]]
    assert [finishes(streamed, index) for index in range(2)] == [["stop"], ["length"]]
    assert set(engine.aborted) == {engine.requests[0].request_id}


async def test_nothing_of_a_stop_is_sent_and_nothing_else_held(tokenizer: Tokenizer) -> None:
    """Case 12, event by event."""
    api = create_api(ScriptedEngine(saying(tokenizer.encode("a b c d e"))), tokenizer)
    streamed = await stream(api, COMPLETIONS, stop=" c d x")
    assert [event["choices"][0]["text"] for event in streamed] == ["a", " b", " c d e"]
    stopped = await stream(api, COMPLETIONS, stop="c d")
    assert text_of(stopped) == "a b "


async def test_a_character_that_stays_incomplete_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("so 🎉")[:-1]
    api = create_api(ScriptedEngine(saying(tokens)), tokenizer)
    assert text_of(await stream(api, COMPLETIONS)) == tokenizer.decode(tokens)


async def test_events_are_single_lines_for_every_client(tokenizer: Tokenizer) -> None:
    text = "a\u2028b\x85c\r\nd\u2029"
    api = create_api(ScriptedEngine(saying(tokenizer.encode(text))), tokenizer)
    async with in_process(api) as client:
        body = {**BODIES[COMPLETIONS], "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = [line async for line in response.aiter_lines() if line and line != "data: [DONE]"]
    assert text_of([json.loads(line.removeprefix("data: ")) for line in lines]) == text
