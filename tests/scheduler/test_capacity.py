"""Verdicts for models on GPUs, and that every way out leads out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.capacity import Question, answer, memory_needed, separated
from scheduler.hardware import gpu
from scheduler.shapes import known_shape
from scheduler.solver import Load, Targets

EIGHT = Question(
    known_shape("Llama-3.1-8B"), gpu("a100-80"), 1, Load(prompt=4096, decodes=32, context=2048), Targets(1.0, 0.05)
)


def test_a_feasible_question_has_a_range_and_needs_no_way_out() -> None:
    found = answer(EIGHT)
    assert found.feasible
    assert found.ways_out is None
    assert found.verdict.chunk_range is not None
    assert found.verdict.chunk_range[0] <= found.verdict.chunk <= found.verdict.chunk_range[1]


def test_what_does_not_fit_is_bound_by_memory() -> None:
    q = replace(EIGHT, shape=known_shape("Llama-3.1-70B"))
    found = answer(q)
    # 70.55e9 weights of 2 bytes, and 327,680 bytes for each of 32 x 2,048 + 4,096 tokens of KV
    assert found.memory_needed == pytest.approx(2 * 70_553_706_496 + 327_680 * (32 * 2048 + 4096))
    assert (found.feasible, found.binding) == (False, "memory")
    assert found.ways_out is not None
    assert found.ways_out.tp is not None
    assert memory_needed(replace(q, tp=found.ways_out.tp)) <= 0.9 * 80e9


def test_the_transfer_of_separated_groups_by_hand() -> None:
    """4,096 tokens of 131,072 bytes over 228 GB/s: 2.355 ms."""
    found = separated(EIGHT)
    assert found is not None
    assert found.kv_transfer_s == pytest.approx(4096 * 131_072 / 228e9)
    assert found.prefill_groups == found.decode_groups == 1


questions = st.builds(
    Question,
    shape=st.sampled_from(["Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-70B"]).map(known_shape),
    listed=st.sampled_from(["a100-80", "h100", "l4"]).map(gpu),
    tp=st.sampled_from([1, 2, 4]),
    load=st.builds(
        Load,
        prompt=st.integers(1, 4096),
        decodes=st.integers(0, 128),
        context=st.integers(0, 4096),
        rate=st.sampled_from([0.0, 0.5, 5.0]),
    ),
    targets=st.builds(Targets, ttft_s=st.floats(0.02, 5), tpot_s=st.floats(0.005, 0.2)),
)


@settings(max_examples=60, deadline=None)
@given(questions)
def test_every_way_out_leads_out(q: Question) -> None:
    found = answer(q)
    if found.ways_out is None:
        assert found.feasible
        return
    ways = found.ways_out
    if ways.tpot_s is not None:
        assert answer(replace(q, targets=replace(q.targets, tpot_s=ways.tpot_s))).feasible
    if ways.ttft_s is not None:
        assert answer(replace(q, targets=replace(q.targets, ttft_s=ways.ttft_s))).feasible
    if ways.decodes is not None:
        assert answer(replace(q, load=replace(q.load, decodes=ways.decodes))).feasible
        assert not answer(replace(q, load=replace(q.load, decodes=ways.decodes + 1))).feasible
    if ways.tp is not None:
        assert ways.tp > q.tp
        assert answer(replace(q, tp=ways.tp)).feasible
    if ways.separated is not None:
        assert ways.separated.ttft_s <= q.targets.ttft_s
        assert ways.separated.tpot_s <= q.targets.tpot_s
