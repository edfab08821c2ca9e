"""Requests that give way in the middle and come back: a client gets what it gets where there is room for all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from tests.deploy.conftest import in_process, until
from tests.deploy.wire import JsonObject
from workers.tokenizer import Tokenizer

NAME = "tiny"
AMPLE, SCARCE = 400, 26
"""Blocks of 16 tokens. The load wants more than four times as many as are there when they are scarce."""

ASKED: dict[str, JsonObject] = {
    "greedy": {"temperature": 0},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "top_k": 4, "seed": 3},
    "a bias": {"temperature": 0, "logit_bias": {"260": 4.0, "261": 5.0}},
    "choices": {"n": 3, "seed": 7, "top_k": 4, "max_tokens": 40},
    "stop strings": {"temperature": 0, "stop": ["ion", "qz", " ab"], "include_stop_str_in_output": True},
    "a schema": {"temperature": 0, "response_format": {"type": "json_object"}, "max_tokens": 50},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
}


@asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[tuple[LocalEngine, httpx.AsyncClient]]:
    config = EngineConfig(
        **{
            "model": str(model), "served_model_name": NAME, "policy": "chunked", "chunk_size": 48, "threads": 1,
            "max_running": 8, "max_model_len": 400, "profile_seconds": 0, **options,
        }
    )  # fmt: skip
    engine = await LocalEngine.start(config)
    async with in_process(create_api(engine, Tokenizer.load(model))) as client:
        yield engine, client
    await engine.close()


def bodies() -> list[JsonObject]:
    """Of each kind two, which begin alike."""
    rnd = random.Random(5)
    system = [rnd.randrange(1000, 40_000) for _ in range(37)]
    return [
        {
            "model": NAME, "prompt": [*system, *(rnd.randrange(1000, 40_000) for _ in range(30))], "max_tokens": 70,
            "return_token_ids": True, "ignore_eos": "response_format" not in asked, **asked,
        }
        for _ in range(2)
        for asked in ASKED.values()
    ]  # fmt: skip


async def answers(client: httpx.AsyncClient) -> list[list[JsonObject]]:
    async def ask(body: JsonObject) -> list[JsonObject]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        choices: list[JsonObject] = response.json()["choices"]
        return choices

    return await asyncio.gather(*map(ask, bodies()))


def same(got: Any, expected: Any) -> bool:
    """Numbers but for their last digits, which a batch of another shape rounds otherwise."""
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    return bool(got == pytest.approx(expected, abs=1e-3) if isinstance(expected, float) else got == expected)


@pytest_asyncio.fixture(scope="module")
async def expected(tiny_model_dir: Path) -> list[list[JsonObject]]:
    async with serving(tiny_model_dir, num_blocks=AMPLE) as (engine, client):
        got = await answers(client)
        assert (await engine.stats())["preemptions"] == 0
    return got


async def check(tiny_model_dir: Path, expected: list[list[JsonObject]], **options: Any) -> None:
    async with serving(tiny_model_dir, num_blocks=SCARCE, **options) as (engine, client):
        got = await answers(client)
        await until(lambda: engine.scheduler.idle)
        engine.scheduler.check()
        stats = await engine.stats()
    for body, one, other in zip(bodies(), got, expected, strict=True):
        assert same(one, other), body
    assert stats["preemptions"] > 0
    assert stats["swap_blocks"]["used"] == stats["blocks"]["referenced"] == stats["violations"] == 0
    assert bool(stats["swapped_in"]) is (options["preempt"] == "swap")


SLOW = [
    {"preempt": "recompute", "policy": "slo"},
    {"preempt": "swap", "policy": "slo", "overlap": 2},
    {"preempt": "swap", "policy": "whole"},
    {"preempt": "swap", "policy": "alternate"},
    {"preempt": "swap", "prefix_caching": False},
    {"preempt": "recompute", "policy": "whole", "overlap": 2},
    {"preempt": "swap", "swap_memory": "200KiB"},
]


@pytest.mark.parametrize(
    "options", [{"preempt": "swap"}, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW)], ids=str
)
async def test_what_they_ask_for_comes_as_if_they_had_never_left(
    tiny_model_dir: Path, expected: list[list[JsonObject]], options: dict[str, Any]
) -> None:
    await check(tiny_model_dir, expected, **options)


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_with_kv_in_codes_as_well(tiny_model_dir: Path, preempt: str) -> None:
    async with serving(tiny_model_dir, num_blocks=AMPLE, kv_dtype="int8") as (_, client):
        expected = await answers(client)
    await check(tiny_model_dir, expected, preempt=preempt, kv_dtype="int8")


async def test_readers_that_leave_while_their_kv_is_in_host_memory(tiny_model_dir: Path) -> None:
    prompts = [tuple(range(i, 60 + i)) for i in range(12)]
    sampling = SamplingParams(temperature=0.0)

    async def read(engine: LocalEngine, name: int) -> list[int]:
        request = Request(f"{name}", prompts[name], 80, sampling)
        return [token async for delta in engine.generate(request) for token in delta.tokens]

    async with serving(tiny_model_dir, num_blocks=AMPLE) as (engine, _):
        expected = await asyncio.gather(*(read(engine, name) for name in range(12)))
    async with serving(tiny_model_dir, num_blocks=SCARCE, preempt="swap") as (engine, _):
        readers = {f"{name}": asyncio.create_task(read(engine, name)) for name in range(12)}
        left: set[str] = set()
        while len(left) < 3 and not all(reader.done() for reader in readers.values()):
            for sequence in [each for each in engine.scheduler.waiting if each.kept][:1]:
                readers[sequence.request_id].cancel()
                left.add(sequence.request_id)
            await asyncio.sleep(0.001)
        await asyncio.gather(*readers.values(), return_exceptions=True)
        await until(lambda: engine.scheduler.idle)
        engine.scheduler.check()
        stats = await engine.stats()
    assert len(left) == 3
    assert [readers[f"{i}"].result() for i in range(12) if f"{i}" not in left] == [
        expected[i] for i in range(12) if f"{i}" not in left
    ]
    assert stats["swap_blocks"]["used"] == stats["blocks"]["referenced"] == 0
