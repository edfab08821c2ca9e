"""What an iteration takes is known before it runs: by counting small ones on a CPU, by the allocator on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import save_tiny
from tests.workers.driver import loaded
from tests.workers.scripts import output_of
from workers.worker import Worker
from workers.worst_case import LiveTensors, Shape, by_counting, plan_of, worst_shape


@given(st.integers(1, 5000), st.integers(1, 70), st.integers(1, 300))
def test_the_shape_has_all_the_tokens_and_sequences_there_can_be(tokens: int, sequences: int, longest: int) -> None:
    shape = worst_shape(tokens, sequences, longest)
    counts = [count for _, count in shape]
    assert sum(counts) == min(tokens, sequences * longest)
    assert len(shape) == min(sequences, tokens)
    assert all(count >= 1 and start + count <= longest for start, count in shape)
    assert sum(shape[0]) == longest


def test_tensors_are_counted_as_long_as_they_live() -> None:
    with LiveTensors() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100).t()  # the same memory
        c = b.contiguous()
        del a, b
        d = torch.zeros(500)
        assert live.peak == 8000
        del c, d
        torch.zeros(1000)
    assert live.peak == 8000


@pytest.mark.parametrize(("tokens", "sequences"), [(700, 1), (700, 12), (40, 40), (3, 8), (64, 4)])
def test_what_is_foretold_covers_what_is_taken(tmp_path: Path, tokens: int, sequences: int) -> None:
    folder = save_tiny(tmp_path)
    sizes = {"max_batched_tokens": tokens, "max_running": sequences, "max_model_len": 700}
    worker = Worker(loaded(folder, 1, threads=1, **sizes).config)
    foretold = worker.load().iteration_bytes
    worker.allocate(-(-700 // 16))
    with LiveTensors() as live:
        worker.execute(plan_of(worst_shape(tokens, sequences, 700), 16))
    assert live.peak <= foretold * 1.05 <= 4 * live.peak
    worker.close()


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    worker = Worker(loaded(save_tiny(tmp_path), 1, threads=1).config)
    worker.load()
    assert worker._cache is None
    assert worker._slots is None
    worker.close()


def test_tokens_and_rows_are_extended_and_what_was_there_before_is_no_part_of_it() -> None:
    kept = []

    def ready(shape: Shape, sample: bool) -> Callable[[], object]:
        kept.append(torch.zeros(10**6))  # as the KV pages
        tokens, rows = sum(count for _, count in shape), len(shape)
        return lambda: torch.zeros(1000 * rows if sample else 10 * tokens)

    assert by_counting(ready, tokens=5000, sequences=20, longest=5000) == 4 * (10 * 5000 + 1000 * 20)


WITHOUT_DYNAMO = """
import sys
from tests.workers.driver import loaded
loaded(sys.argv[1], 8)
print("torch._dynamo" in sys.modules)
"""


def test_counting_does_without_what_is_large_to_import(tiny_model_dir: Path) -> None:
    assert output_of(WITHOUT_DYNAMO, tiny_model_dir).split() == ["False"]
