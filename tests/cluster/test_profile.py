"""The micro-profile on workers whose every iteration takes what a known law says, in a clock of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.profile import fitted
from scheduler.costmodel import Coefficients
from scheduler.plan import IterationPlan, IterationResult
from scheduler.roofline import Features

LAW = Coefficients(0.002, 0.04, 0.002, 1e-6, 1e-7, 1e-4, 2.0)
INFO = EngineInfo(
    model="m",
    model_dir="nowhere",
    served_model_name="m",
    max_model_len=8192,
    vocab_size=100,
    block_size=16,
    num_blocks=2000,
    tp=1,
    groups=1,
    policy="slo",
    chunk_size=512,
    device="cpu",
    dtype="float32",
    attention="cpu",
    transport="none",
)
CONFIG = EngineConfig()


@dataclass
class LawfulExecutor:
    """`slower` than the law by this factor."""

    slower: float = 1.0
    now: float = 0.0
    forwards: int = 0

    def clock(self) -> float:
        return self.now

    async def execute(self, plan: IterationPlan) -> IterationResult:
        for forward in plan.forwards:
            f = Features(decodes=len(forward.decodes))
            for segment in forward.chunks:
                if segment.count > 1:
                    f = f.with_chunk(segment.start, segment.count)
                else:
                    f = f._replace(decodes=f.decodes + 1, decode_context=f.decode_context + segment.start + 1)
            self.now += LAW.predict(f) * self.slower
            self.forwards += 1
        return IterationResult(plan.iteration, ())

    async def close(self) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("cluster.profile.cache_dir", lambda: tmp_path)
    return tmp_path


def decodes(count: int, context: int) -> Features:
    return Features(decodes=count, decode_context=count * context)


async def _fitted(executor: LawfulExecutor, info: EngineInfo = INFO) -> Coefficients:
    return await fitted(executor, info, CONFIG, executor.clock, None)


async def test_it_finds_the_law_and_is_known_the_next_time(cache: Path) -> None:
    executor = LawfulExecutor()
    found = await _fitted(executor)
    for f in (decodes(8, 400), Features().with_chunk(300, 200), decodes(4, 200).with_chunk(0, 48)):
        assert found.predict(f) == pytest.approx(LAW.predict(f), rel=0.03)
    measured = executor.forwards
    assert await _fitted(executor) == found
    assert executor.forwards - measured < measured / 3, "only tried, not measured again"
    (path,) = (cache / "profiles").iterdir()
    assert json.loads(path.read_text())["coefficients"] == found.as_dict()


async def test_what_a_busy_machine_left_behind_is_measured_again(cache: Path) -> None:
    await _fitted(LawfulExecutor(slower=4.0))
    found = await _fitted(LawfulExecutor())
    f = decodes(8, 400)
    assert found.predict(f) == pytest.approx(LAW.predict(f), rel=0.03)


async def test_another_pool_or_tensor_parallel_degree_is_another_profile(cache: Path) -> None:
    for info in (INFO, replace(INFO, num_blocks=20), replace(INFO, tp=2)):
        await _fitted(LawfulExecutor(), info)
    assert len(list((cache / "profiles").iterdir())) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"coefficients": {"overhead": 1}}'])
async def test_a_cache_that_is_not_whole_is_no_cache(cache: Path, content: str) -> None:
    await _fitted(LawfulExecutor())
    (path,) = (cache / "profiles").iterdir()
    path.write_text(content)
    found = await _fitted(LawfulExecutor())
    assert found.predict(decodes(8, 100)) == pytest.approx(LAW.predict(decodes(8, 100)), rel=0.03)
