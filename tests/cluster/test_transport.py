"""The ways of plans to ranks: what each takes and gives is the same, and so is what is heard of a rank that fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.config import EngineConfig
from cluster.group import WorkerGroup
from cluster.recovery import WorkersLost
from cluster.transport import make_transport
from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
FIRST = IterationPlan(
    0, (Forward(chunks=(Segment(0, 0, 3, (0,), sample=True),)),), (Admission(0, (5, 6, 7), 3, GREEDY),)
)
NOBODY_THERE = IterationPlan(0, (Forward(decodes=(7,)),))
"""It goes on with a slot that has nothing."""


@asynccontextmanager
async def a_group(model_dir: Path, transport: str, tp: int) -> AsyncGenerator[WorkerGroup]:
    config = EngineConfig(model=str(model_dir), num_blocks=16, max_running=4, threads=1, tp=tp, transport=transport)
    group = await WorkerGroup.start(config, str(model_dir), "cpu", f"by-{transport}-{tp}", lambda what: None)
    try:
        yield group
    finally:
        await group.destroy()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("transport", "is_by"), [("auto", "socket"), ("actor", "actor"), ("compiled", "compiled")])
async def test_a_rank_that_fails_says_why(tiny_model_dir: Path, transport: str, is_by: str) -> None:
    async with a_group(tiny_model_dir, transport, tp=2) as group:
        assert group.transport == is_by
        assert len((await group.execute(FIRST)).tokens) == 1
        with pytest.raises(WorkersLost, match=r"a rank failed: .*PlanError.*slot 7"):
            await group.execute(NOBODY_THERE)
        if is_by == "socket":  # and it stays that way: nobody is left to answer
            with pytest.raises(WorkersLost, match="slot 7"):
                await group.execute(FIRST)


@pytest.mark.usefixtures("ray_cluster")
async def test_sockets_are_for_ranks_on_the_scheduler_s_node(tiny_model_dir: Path) -> None:
    with pytest.raises(ValueError, match="only where all ranks are on the scheduler's node"):
        await make_transport("socket", [], "cpu", here=False)
    assert (await make_transport("auto", [], "cpu", here=False)).name == "actor"
