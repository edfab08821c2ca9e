"""A whole engine whose KV pool is a quarter of what its load wants at once: every request ends, with its own tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from scheduler.request import Finish, Request
from scheduler.residents import MOST_PREEMPTIONS
from scheduler.sampling import SamplingParams

BLOCK, RUNNING = 16, 8
SCHEMA = '{"type":"object","additionalProperties":{"type":"array","items":{"type":"string"}}}'


def load(vocabulary: int, count: int = 16) -> list[Request]:
    """Half of them greedy, half sampled; two in three share a beginning with others; one in four has to be JSON."""
    rnd = random.Random(5)
    system = [rnd.randrange(vocabulary) for _ in range(37)]
    requests = []
    for i in range(count):
        own = tuple(rnd.randrange(vocabulary) for _ in range(rnd.randrange(10, 60)))
        prompt = (*system, *own) if i % 3 else own
        json_schema = {"json_schema": SCHEMA, "end_tokens": (2,)} if i % 4 > 2 else {}
        sampling = SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, **json_schema)  # type: ignore[arg-type]
        requests.append(Request(f"r{i}", prompt, rnd.randrange(40, 70), sampling))
    return requests


def blocks_wanted(requests: list[Request]) -> int:
    """Of as many as run at once, the largest ones."""
    sizes = sorted(-(-(len(r.prompt) + r.max_tokens) // BLOCK) for r in requests)
    return sum(sizes[-RUNNING:])


async def run(model: Path, requests: list[Request], num_blocks: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    config = EngineConfig(
        model=str(model),
        device="cpu",
        policy="chunked",
        chunk_size=48,
        num_blocks=num_blocks,
        max_running=RUNNING,
        threads=1,
        profile_seconds=0,
        **options,
    )
    engine = await LocalEngine.start(config)
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}

    async def read(request: Request) -> Finish | None:
        finish = None
        async for delta in engine.generate(request):
            got[request.request_id].extend(delta.tokens)
            finish = delta.finish
        return finish

    try:
        ends = await asyncio.gather(*map(read, requests))
        assert ends == [Finish.LENGTH] * len(requests)
        engine.scheduler.check()
        stats = await engine.stats()
        assert stats["blocks_free"] == num_blocks
        assert stats["swap_blocks"]["used"] == 0
        return got, stats
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "options", [{}, {"preempt": "swap"}, {"preempt": "swap", "swap_memory": "400KiB", "overlap": 2}], ids=str
)
async def test_a_quarter_of_the_memory_gives_the_same_tokens(tiny_model_dir: Path, options: dict[str, Any]) -> None:
    requests = load(49_000)
    wanted = blocks_wanted(requests)
    expected, at_ease = await run(tiny_model_dir, requests, 2 * wanted)
    assert at_ease["preemptions"] == 0
    got, stats = await run(tiny_model_dir, requests, wanted // 4, **options)
    assert all(len(got[request.request_id]) == request.max_tokens for request in requests)
    assert got == expected
    assert 0 < stats["preemptions"] <= MOST_PREEMPTIONS * len(requests)
    if options:
        assert stats["swapped_out"] >= stats["swapped_in"] > 0
    else:
        assert stats["swapped_out"] == stats["swapped_in"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_the_real_model_under_pressure(smollm2_dir: Path, preempt: str) -> None:
    requests = load(40_000)
    wanted = blocks_wanted(requests)
    expected, _ = await run(smollm2_dir, requests, 2 * wanted)
    got, stats = await run(smollm2_dir, requests, wanted // 4, preempt=preempt)
    assert got == expected
    assert 0 < stats["preemptions"] <= MOST_PREEMPTIONS * len(requests)
