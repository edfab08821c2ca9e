"""The process of a rank: what it imports, and what it keeps while nothing is asked of it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

import cluster.worker_actor
from cluster.config import EngineConfig
from cluster.group import WorkerGroup
from cluster.worker_actor import CONTROL, PARK, RankActor
from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.sampling import SamplingParams

NOT_FOR_A_RANK = (
    *("transformers", "tokenizers", "huggingface_hub", "sympy", "mpmath", "networkx", "gguf", "jinja2"),
    *("llguidance", "fastapi", "rich", "pandas", "pyarrow", "plotly", "scipy", "deploy"),
    *(
        "torch._dynamo",
        "torch._inductor",
        "torch._prims",
        "torch.distributed.tensor",
        "numpy.testing",
        "ray.serve",
        "ray.data",
    ),
)
EVERYTHING_ASKED = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, repetition_penalty=1.1)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("tp", [1, 2])
async def test_a_rank_imports_what_it_computes_with(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """Whatever else is imported takes memory in every rank: transformers alone 70 MiB."""

    class Watched(RankActor):
        @ray.method(concurrency_group=CONTROL)
        def modules(self) -> list[str]:
            return sorted(sys.modules)

    monkeypatch.setattr("cluster.group.RankActor", Watched)
    config = EngineConfig(model=str(tiny_model_dir), num_blocks=16, max_running=4, threads=1, tp=tp)
    group = await WorkerGroup.start(config, str(tiny_model_dir), "cpu", "imports", lambda what: None)
    try:
        prompt = Segment(0, 0, 3, (0,), sample=True)
        await group.execute(
            IterationPlan(0, (Forward(chunks=(prompt,)),), (Admission(0, (5, 6, 7), 3, EVERYTHING_ASKED),))
        )
        await group.execute(IterationPlan(1, (Forward(decodes=(0,)),)))
        calls: list[Any] = [rank.modules.remote() for rank in group.ranks]
        for call in calls:
            imported = await call
            assert "workers.worker" in imported
            assert [name for name in NOT_FOR_A_RANK if name in imported] == []
    finally:
        await group.close()


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a rank has had its free memory returned."""
    event = threading.Event()
    monkeypatch.setattr(cluster.worker_actor, "give_back", event.set)
    monkeypatch.setattr(cluster.worker_actor, "GIVES_BACK_AFTER_S", 0.0)
    return event


def parked() -> RankActor:
    """A rank without a process of its own."""
    rank = object.__new__(RankActor)
    rank._awake = threading.Event()
    return rank


def test_a_rank_that_waits_gives_back_what_iterations_took(given_back: threading.Event) -> None:
    rank = parked()
    waiting = threading.Thread(target=rank.execute, args=(PARK,))
    waiting.start()
    assert given_back.wait(60)
    assert waiting.is_alive(), "it is parked still"
    rank.wake()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_rank_that_is_woken_at_once_keeps_it(given_back: threading.Event) -> None:
    rank = parked()
    rank.wake()
    assert rank.execute(PARK) == b""
    assert not given_back.is_set()
