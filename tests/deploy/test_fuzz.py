"""Requests that are wrong in every way a generator finds: none is a 5xx, none hangs, none leaves a block behind."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from deploy.api.schemas import ChatRequest, CompletionRequest
from deploy.trace import chrome_trace
from tests.deploy.conftest import in_process, until
from tests.deploy.test_disconnect import nothing_left
from tests.deploy.tries import tries
from workers.tokenizer import Tokenizer

NAME = "tiny"
WAIT_S = 120
"""A request of a few tokens that has not been answered by then hangs."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**400, -1, 0, 1])
    | st.floats()
    | st.sampled_from(["", "NaN", "Infinity", "1", "true", NAME, "\x00", "\ud800", "\u202e", "{{ 7 * 7 }}", "a" * 3000])
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
prompts = (
    st.text(min_size=1, max_size=60)
    | st.lists(st.integers(0, 600), min_size=1, max_size=40)
    | st.lists(st.text(max_size=9), max_size=4)
    | st.lists(st.lists(st.integers(-1, 50_000), max_size=5), max_size=4)
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", ""])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=20) | values})
    | st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), values, max_size=3),
    max_size=4,
)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 10),
    "n": st.integers(1, 4),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=4),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 5),
    "logit_bias": st.dictionaries(st.integers(-1, 600).map(str), st.floats(-100, 100), max_size=4),
    "slo": st.sampled_from(["interactive", "batch", "none"])
    | st.fixed_dictionaries({"ttft_ms": st.floats(0, 1e4), "tpot_ms": st.floats(0, 1e4)}),
    "cache_salt": st.text(max_size=4),
    "return_token_ids": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "tokenize", "messages", "bos_token"]), values),
}


@st.composite
def bodies(draw: st.DrawFn, schema: type[CompletionRequest | ChatRequest]) -> dict[str, Any]:
    """A body that is mostly right, with fields that are mostly wrong, and few tokens to generate."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": draw(st.integers(1, 4))}
    body |= {"prompt": draw(prompts)} if schema is CompletionRequest else {"messages": draw(messages)}
    for name in draw(st.lists(st.sampled_from(sorted(schema.model_fields)), max_size=3, unique=True)):
        right = draw(st.booleans()) and name in plausible
        body[name] = draw(plausible[name] if right else values)
    for name in draw(st.lists(st.text(max_size=8), max_size=1)):
        body[name] = draw(values)
    if body.get("max_tokens") is None or draw(st.integers(0, 9)) == 0:
        body["max_tokens"] = 3  # a chat without a bound goes on to the end of the context
    return body


requests = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest)),
    st.tuples(st.just("/v1/chat/completions"), bodies(ChatRequest)),
)


@pytest_asyncio.fixture(scope="module")
async def tiny(tiny_model_dir: Path) -> AsyncIterator[tuple[LocalEngine, httpx.AsyncClient]]:
    config = EngineConfig(
        model=str(tiny_model_dir), served_model_name=NAME, max_model_len=96, num_blocks=64, profile_seconds=0
    )
    engine = await LocalEngine.start(config)
    async with in_process(create_api(engine, Tokenizer.load(tiny_model_dir))) as client:
        yield engine, client
    await engine.close()


async def check(engine: LocalEngine, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """The status. `json.dumps` writes NaN, lone surrogates (escaped) and integers of any length, as a hostile client
    would."""
    content = json.dumps(body)
    answer = await asyncio.wait_for(
        client.post(path, content=content, headers={"content-type": "application/json"}), WAIT_S
    )
    assert answer.status_code in (200, 400, 404, 429), (answer.status_code, answer.text, content)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    else:
        assert '"error"' not in answer.text.split("data: ")[-2 if body.get("stream") is True else -1], answer.text
    await asyncio.wait_for(until(lambda: nothing_left(engine)), WAIT_S)
    return answer.status_code


def fuzz(loop: asyncio.AbstractEventLoop, tiny: tuple[LocalEngine, httpx.AsyncClient], examples: int) -> Counter[int]:
    """So many requests. Returns the statuses that came."""
    engine, client = tiny
    statuses: Counter[int] = Counter()

    @tries(examples)
    @given(requests)
    def one(request: tuple[str, dict[str, Any]]) -> None:
        statuses[asyncio.run_coroutine_threadsafe(check(engine, client, *request), loop).result()] += 1

    one()
    return statuses


async def test_requests_that_are_wrong(tiny: tuple[LocalEngine, httpx.AsyncClient]) -> None:
    done = await asyncio.to_thread(fuzz, asyncio.get_running_loop(), tiny, 300)
    assert done.total() >= 300
    assert min(done[200], done[400]) > 30, done


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_twenty_thousand_requests_that_are_wrong(tiny: tuple[LocalEngine, httpx.AsyncClient]) -> None:
    done = await asyncio.to_thread(fuzz, asyncio.get_running_loop(), tiny, 20_000)
    assert done.total() >= 20_000
    assert min(done[200], done[400]) > 1000, done


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=3), st.data())
async def test_raw_bytes(tiny: tuple[LocalEngine, httpx.AsyncClient], start: str, data: st.DataObject) -> None:
    """A good body with bytes changed, cut and put in: it may still be good."""
    raw = bytearray(json.dumps({"model": NAME, "prompt": f"{start} a", "max_tokens": 2, "stop": ["x"]}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    engine, client = tiny
    headers = {"content-type": "application/json"}
    answer = await asyncio.wait_for(client.post("/v1/completions", content=bytes(raw), headers=headers), WAIT_S)
    assert answer.status_code in (200, 400, 404), (answer.text, raw)
    await asyncio.wait_for(until(lambda: nothing_left(engine)), WAIT_S)


# Logs that somebody else may have written.

numbers = st.integers(-5, 10**6) | st.floats() | values
chunks = st.fixed_dictionaries(
    dict.fromkeys(("offset", "count", "waited_ms", "tpot_ms", "tbt_ms"), numbers) | {"request": st.text() | values}
)
fields = (
    *("group", "seq", "budget", "bound", "allowed_ms", "tightest", "prefill_tokens", "decodes"),
    *("predicted_ms", "actual_ms", "start_ms", "preempted"),
)
names = st.lists(st.text(max_size=2), max_size=2) | values
entries = st.fixed_dictionaries(
    dict.fromkeys(fields, numbers)
    | {"chunks": st.lists(chunks, max_size=2) | values, "tokens": names, "finished": names}
)


LOGGED: dict[str, Any] = {**dict.fromkeys(fields, 1), "chunks": [], "tokens": [], "finished": []}


@example([{**LOGGED, "group": float("inf")}])
@example([{**LOGGED, "start_ms": 10**400}])
@example([LOGGED])
@settings(max_examples=300, deadline=None)
@given(st.lists(entries | values, max_size=3))
def test_iteration_logs_of_any_content_are_a_trace_or_a_value_error(log: list[Any]) -> None:
    try:
        made = chrome_trace(log)
    except ValueError:
        return
    json.dumps(made)
