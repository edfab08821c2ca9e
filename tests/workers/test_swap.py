"""Blocks that are copied to host memory and back: byte for byte, in the order of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler.plan import Admission, Forward, IterationPlan, Segment, Swap
from tests.conftest import save_tiny
from tests.workers.driver import GREEDY, Driver, loaded
from workers.host_cache import HostCache
from workers.kv_cache import KvCache
from workers.slots import PlanError
from workers.worker import Worker

PROMPT = [(7 * i) % 500 for i in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_comes_back_is_what_went_out(dtype: torch.dtype) -> None:
    cache = KvCache(3, 6, 4, 2, 8, dtype, torch.device("cpu"))
    host = HostCache(cache, 4)
    keys, values = cache.layers[1]
    for pages in (keys, values):
        pages.write(torch.arange(24), torch.randn(24, 2, 8))
    before = [plane.clone() for plane in cache.planes]
    host.carry_out(Swap(True, (0, 3), (2, 1)))
    host.carry_out(Swap(True, (5,), (0,)))
    for plane in cache.planes:
        plane.zero_()
    host.carry_out(Swap(False, (4, 1, 2), (1, 2, 0)))
    for plane, was in zip(cache.planes, before, strict=True):
        assert torch.equal(plane[:, :, [4, 1, 2]], was[:, :, [3, 0, 5]])
        assert not plane[:, :, [0, 3, 5]].any()
    assert keys.read(torch.tensor([4]), torch.float32).any(), "what was moved is read"


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_sequence_goes_on_from_blocks_that_were_copied_back(tmp_path: Path, kv_dtype: str) -> None:
    """Elsewhere than they were, and after others have written to where they were."""
    folder = save_tiny(tmp_path)
    worker = loaded(folder, 20, threads=1, kv_dtype=kv_dtype)
    driver = Driver(worker)
    driver.admit(0, PROMPT)
    expected = driver.generate(0, 6, 64)
    worker.allocate(20, swap_blocks=5)
    entering, leaving = (Admission(0, tuple(PROMPT), 40, GREEDY),), (0,)
    first = worker.execute(IterationPlan(1, (Forward(chunks=(Segment(0, 0, 40, (0, 1, 2), True),)),), entering))
    other = Admission(1, tuple(reversed(PROMPT)), 40, GREEDY)
    overwriting = Forward(chunks=(Segment(1, 0, 40, (1, 0, 2), True),))
    worker.execute(IterationPlan(2, (overwriting,), (other,), leaving, (Swap(True, (0, 1, 2), (4, 0, 3)),)))
    tokens = [*first.tokens]
    back = Admission(0, (*PROMPT, *tokens), 40, GREEDY)
    resumed = Forward(chunks=(Segment(0, 40, 1, (9, 8, 7), True),))
    plan = IterationPlan(3, (resumed,), (back,), (), (Swap(False, (9, 8, 7), (4, 0, 3)),))
    tokens += worker.execute(plan).tokens
    while len(tokens) < 6:
        tokens += worker.execute(IterationPlan(4, (Forward(decodes=(0,)),))).tokens
    assert tokens == expected
    worker.close()


def test_swaps_that_cannot_be(tmp_path: Path) -> None:
    worker: Worker = loaded(save_tiny(tmp_path), 20, threads=1)
    with pytest.raises(PlanError, match="no host memory"):
        worker.execute(IterationPlan(1, (), swaps=(Swap(True, (0,), (0,)),)))
    worker.allocate(20, swap_blocks=2)
    for swap in (Swap(True, (20,), (0,)), Swap(False, (0,), (2,)), Swap(True, (-1,), (0,))):
        with pytest.raises(PlanError, match="outside the pools"):
            worker.execute(IterationPlan(1, (), swaps=(swap,)))
    worker.close()
