"""What goes wrong on our side is an answer, or the last event of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cluster.engine import EngineUnavailable
from deploy.api import ApiSettings, create_api
from scheduler.errors import RequestRefused
from scheduler.request import Delta, Finish, Request
from tests.deploy.conftest import in_process
from tests.deploy.refusals import CHAT, COMPLETIONS, HELLO, refused, the_next_request_works  # noqa: F401
from tests.deploy.scripted import ScriptedEngine, raising, saying
from tests.deploy.wire import error_of, events
from workers.tokenizer import Tokenizer


class Broken(Tokenizer):
    def __init__(self) -> None:
        self.eos_token_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise OverflowError("out of range integral type conversion attempted")

    def encode_chat(self, *arguments: Any, **options: Any) -> list[int]:
        raise RuntimeError("Already borrowed")


async def test_a_tokenizer_that_raises_is_an_answer() -> None:
    """Case 11."""
    async with in_process(create_api(ScriptedEngine(saying([1])), Broken())) as client:
        for path, fields in ((COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": HELLO})):
            for stream in (False, True):
                error = error_of(await client.post(path, json={"model": "scripted", "stream": stream, **fields}), 500)
                assert error["type"] == "server_error"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestRefused("queue_full", "9 requests are waiting"), 429, "queue_full"),
        (RequestRefused("kv_capacity_exceeded", "needs 9 blocks, has 2", "prompt"), 400, "kv_capacity_exceeded"),
        (EngineUnavailable("a worker died"), 503, "engine_unavailable"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_what_the_engine_raises(tokenizer: Tokenizer, error: Exception, status: int, code: str, n: int) -> None:
    api = create_api(ScriptedEngine(raising(error)), tokenizer)
    async with in_process(api) as client:
        for stream in (False, True):
            body = {"model": "scripted", "prompt": "Hello", "stream": stream, "n": n}
            response = await client.post(COMPLETIONS, json=body)
            said = error_of(response, status)
            assert said["code"] == code
            assert "secret" not in said["message"]
            assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error_event(tokenizer: Tokenizer) -> None:
    for script in (raising(EngineUnavailable("a worker died"), after=[28, 29]), saying([28, 29], Finish.ERROR, "NaN")):
        async with in_process(create_api(ScriptedEngine(script), tokenizer)) as client:
            body = {"model": "scripted", "prompt": "Hello", "stream": True}
            *before, last = events((await client.post(COMPLETIONS, json=body)).text)
            assert before
            assert all(event["choices"][0]["finish_reason"] is None for event in before)
            assert set(last) == {"error"}
            assert last["error"]["type"] == "server_error"


async def test_a_sequence_that_fails_is_a_500_with_its_reason(tokenizer: Tokenizer) -> None:
    api = create_api(ScriptedEngine(saying([28], Finish.ERROR, "logits are not finite")), tokenizer)
    async with in_process(api) as client:
        error = error_of(await client.post(COMPLETIONS, json={"model": "scripted", "prompt": "Hello"}), 500)
        assert "logits are not finite" in error["message"]


async def test_health_and_metrics_of_an_engine_that_is_gone(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(saying([28]))
    async with in_process(create_api(engine, tokenizer)) as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        engine.failure = EngineUnavailable("no iteration within 30 s")
        for path in ("/health", "/metrics"):
            assert error_of(await client.get(path), 503)["code"] == "engine_unavailable"


async def test_a_request_that_takes_too_long_is_ended(tokenizer: Tokenizer) -> None:
    async def forever(request: Request) -> AsyncGenerator[Delta]:
        yield Delta(request.request_id, (28,))
        await asyncio.sleep(1000)

    engine = ScriptedEngine(forever)
    async with in_process(create_api(engine, tokenizer, ApiSettings(request_timeout_s=0.05))) as client:
        body = {"model": "scripted", "prompt": "Hello"}
        assert error_of(await client.post(COMPLETIONS, json=body), 504)["code"] == "request_timeout"
        streamed = events((await client.post(COMPLETIONS, json={**body, "stream": True})).text)
        assert streamed[-1]["error"]["code"] == "request_timeout"
    assert engine.aborted == [request.request_id for request in engine.requests]
