"""A simulation runs the server's own objects, and plans what the live engine planned."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import cluster.assembly
import cluster.loop
import scheduler.scheduler
from cluster.assembly import make_scheduler
from cluster.config import EngineConfig
from cluster.local import LocalEngine
from cluster.simulated import replay as module
from cluster.simulated.replay import Recording, replay
from cluster.tuning import Tuning, promise_book
from scheduler.costmodel import OnlineCostModel
from scheduler.request import Request


def some_requests(count: int, vocab: int) -> list[Request]:
    rng = random.Random(7)
    return [
        Request(f"r{i}", tuple(rng.randrange(vocab) for _ in range(rng.randrange(3, 200))), rng.randrange(1, 60))
        for i in range(count)
    ]


async def live_run(engine: LocalEngine, requests: list[Request]) -> Recording:
    """Requests into a running engine: some together, some into a busy one, some after it was idle."""
    recording = Recording()
    engine.observers.append(recording)
    rng = random.Random(11)

    async def read(request: Request) -> None:
        async for _ in engine.generate(request):
            pass

    reading = []
    for request in requests:
        reading.append(asyncio.create_task(read(request)))
        await asyncio.sleep(rng.choice([0, 0, 0.002, 0.02]))
        if rng.random() < 0.1:
            await asyncio.gather(*reading)
    await asyncio.gather(*reading)
    return recording


@pytest.mark.parametrize("policy", ["whole", "alternate", "chunked", "slo"])
async def test_the_plans_of_a_live_run_come_out_again(
    policy: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STALLFREE_CACHE", str(tmp_path))
    config = EngineConfig(
        model=str(tiny_model_dir), policy=policy, chunk_size=24, max_running=6, num_blocks=20, threads=1,
        ttft_ms=50, tpot_ms=5, max_model_len=512, block_size=16,
        profile_seconds=0.1 if policy == "slo" else 0,
    )  # fmt: skip
    engine = await LocalEngine.start(config)
    try:
        base = None if engine.tuning is None else engine.tuning.cost.base
        requests = some_requests(24, 1000)
        recording = await live_run(engine, requests)
        info = engine.info
    finally:
        await engine.close()

    def again() -> list[cluster.loop.IterationRecord]:
        tuning = None
        if base is not None:
            cost = OnlineCostModel(base)
            tuning = Tuning(cost, promise_book(config, cost))
        return replay(make_scheduler(config, info, tuning), requests, recording, tuning)

    replayed = await asyncio.to_thread(again)
    assert len(recording.records) > 50
    assert max(len(record.under_way.preempted) for record in recording.records) > 0, "the pool was scarce"
    assert [record.plan for record in replayed] == [record.plan for record in recording.records]
    assert [record.under_way.decision for record in replayed] == [r.under_way.decision for r in recording.records]
    assert [list(record.timings) for record in replayed] == [list(record.timings) for record in recording.records]


def test_it_is_the_very_same_code() -> None:
    assert module.IterationLoop is cluster.loop.IterationLoop
    assert module.Scheduler is scheduler.scheduler.Scheduler
