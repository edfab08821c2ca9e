"""Prefix reuse over the API and on the real model: the same tokens whether KV was reused or not, and what is told."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from scheduler.errors import RequestRefused
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from tests.deploy.conftest import MODEL, until
from tests.deploy.wire import JsonObject
from workers.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
BLOCK = 16
_NUMBERS = itertools.count()


@pytest.fixture
def words(request: pytest.FixtureRequest) -> list[int]:
    """A prompt that no other test sends, and the same in each run of this one."""
    return prompt_of(request.node.name, 70)


def fresh_prompt(length: int) -> list[int]:
    """One that nobody has sent before in this run."""
    return prompt_of(f"fresh {next(_NUMBERS)}", length)


def prompt_of(name: str, length: int) -> list[int]:
    rnd = random.Random(name)
    return [rnd.randrange(1000, 40_000) for _ in range(length)]


async def ask(client: httpx.AsyncClient, **fields: Any) -> JsonObject:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer: JsonObject = response.json()
    return answer


def cached(answer: JsonObject) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_usage_says_what_was_cached(client: httpx.AsyncClient, words: list[int]) -> None:
    first = await ask(client, prompt=words, max_tokens=20)
    again = await ask(client, prompt=words, max_tokens=20)
    assert (cached(first), cached(again)) == (0, 64)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    turn = [*words, *first["choices"][0]["token_ids"], *words[:5]]
    assert cached(await ask(client, prompt=turn, max_tokens=2)) == 80, "what was generated is found as well"


async def test_tenants_share_nothing(client: httpx.AsyncClient, words: list[int]) -> None:
    for salt, expected in (("one", 0), ("one", 64), ("two", 0), (None, 0), ("two", 64)):
        assert cached(await ask(client, prompt=words, max_tokens=1, cache_salt=salt)) == expected


@pytest.mark.parametrize("salt", ["", 5, ["a"], "x" * 257])
async def test_a_salt_that_is_none_is_refused_by_name(client: httpx.AsyncClient, salt: object) -> None:
    body = {"model": MODEL, "prompt": "a", "cache_salt": salt}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


async def test_choices_share_the_prompt(client: httpx.AsyncClient, engine: LocalEngine, words: list[int]) -> None:
    before = engine.scheduler.stats()["prefix_tokens_hit"]
    answer = await ask(client, prompt=words, max_tokens=6, n=4, temperature=1, seed=3)
    assert engine.scheduler.stats()["prefix_tokens_hit"] - before == 3 * 64
    assert cached(answer) == 0, "the first choice computed it"
    alone = [await ask(client, prompt=words, max_tokens=6, temperature=1, seed=3, cache_salt="alone")]
    assert answer["choices"][0]["token_ids"] == alone[0]["choices"][0]["token_ids"]


async def test_metrics_have_the_pool(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    for name in (
        'kv_blocks{model_name="smollm2",state="cached"}',
        "prefix_cache_hit_tokens_total",
        "kv_evictions_total",
    ):
        assert f"stallfree_{name}" in text


@asynccontextmanager
async def engine_with(model: str, **options: Any) -> AsyncIterator[LocalEngine]:
    running = await LocalEngine.start(EngineConfig(model=model, profile_seconds=0, policy="chunked", **options))
    yield running
    await running.close()


async def tokens_of(engine: LocalEngine, request: Request) -> tuple[list[int], int]:
    """What it generates, and how many of its prompt's tokens were cached."""
    tokens: list[int] = []
    reused = 0
    async for delta in engine.generate(request):
        tokens += delta.tokens
        reused += delta.cached_tokens
    return tokens, reused


def greedy(prompt: list[int], count: int = 12) -> Request:
    return Request(uuid.uuid4().hex, tuple(prompt), count, SamplingParams(temperature=0.0))


def sampled(prompt: list[int], count: int = 12) -> Request:
    return Request(uuid.uuid4().hex, tuple(prompt), count, SamplingParams(temperature=0.9, seed=11))


async def test_the_same_tokens_off_cold_hit_and_after_eviction(tokenizer: Tokenizer) -> None:
    text = "The history of the steam engine begins long before the first railway. " * 6
    system = tokenizer.encode(text)
    prompts = [[*system, *tokenizer.encode(end)] for end in ("In Rome,", " Later, James Watt", " It was")]
    pool = {"max_model_len": 256, "num_blocks": 20, "chunk_size": 48}
    made = [partial(make, prompt) for prompt in prompts for make in (greedy, sampled)]
    async with engine_with(MODEL, prefix_caching=False, **pool) as off:
        expected = []
        for make in made:
            tokens, reused = await tokens_of(off, make())
            assert reused == 0
            expected.append(tokens)
    async with engine_with(MODEL, **pool) as on:
        assert await tokens_of(on, made[0]()) == (expected[0], 0)
        for make, tokens in zip(made, expected, strict=True):
            got, reused = await tokens_of(on, make())
            assert got == tokens, "from a hit"
            assert reused >= len(system) // BLOCK * BLOCK - BLOCK
        for _ in range(2):
            await tokens_of(on, greedy(fresh_prompt(235), 2))
        assert await tokens_of(on, made[0]()) == (expected[0], 0), "after eviction"
        together = await asyncio.gather(*(tokens_of(on, make()) for make in made[:3]))
        assert [tokens for tokens, _ in together] == expected[:3], "side by side, in a pool too small for all of them"


@pytest.mark.slow
async def test_a_soak_of_500_requests(tiny_model_dir: Path) -> None:
    """The real engine with a tiny model: readers that go away at random, a pool too small, beginnings in common."""
    rnd = random.Random(5)
    systems = [fresh_prompt(rnd.randrange(5, 90)) for _ in range(6)]
    async with engine_with(
        str(tiny_model_dir), max_model_len=256, num_blocks=24, chunk_size=32, max_running=8, overlap=2
    ) as engine:

        async def one(number: int) -> None:
            prompt = (*rnd.choice(systems), *fresh_prompt(rnd.randrange(1, 40)))
            stays = rnd.choice((1, 5, 100, 100, 100))
            request = Request(f"r{number}", prompt, rnd.randrange(1, 100), SamplingParams(temperature=0.0))
            got = 0
            async for delta in engine.generate(request):
                got += len(delta.tokens)
                if got >= stays:
                    return
            assert got == request.max_tokens

        waiting = list(range(500))

        async def client() -> None:
            while waiting:
                await one(waiting.pop())

        await asyncio.gather(*(client() for _ in range(24)))
        await until(lambda: engine.scheduler.idle)
        engine.scheduler.check()
        stats = engine.scheduler.stats()
        assert stats["blocks"]["referenced"] == 0
        assert stats["blocks"]["free"] + stats["blocks"]["cached"] == 24
        assert min(stats["evictions"], stats["prefix_tokens_hit"], stats["preemptions"]) > 0
        assert stats["violations"] == 0


async def test_what_can_never_fit_is_refused_with_the_numbers_and_nobody_waits_behind_it() -> None:
    async with engine_with(MODEL, max_model_len=512, num_blocks=6, chunk_size=64) as engine:
        with pytest.raises(RequestRefused, match="needs 7 KV blocks of 16 tokens, but the whole pool has 6") as refused:
            await tokens_of(engine, greedy(fresh_prompt(100), 4))
        assert refused.value.code == "kv_capacity_exceeded"
        outgrows, fits = greedy(fresh_prompt(80), 100), greedy(fresh_prompt(40), 5)
        ends = await asyncio.gather(ended(engine, outgrows), ended(engine, fits))
        assert list(ends) == [(17, "length", "kv_capacity"), (5, "length", None)]


async def ended(engine: LocalEngine, request: Request) -> tuple[int, str | None, str | None]:
    count, finish, reason = 0, None, None
    async for delta in engine.generate(request):
        count += len(delta.tokens)
        finish, reason = None if delta.finish is None else delta.finish.value, delta.reason
    return count, finish, reason
