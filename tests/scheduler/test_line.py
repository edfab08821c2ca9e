"""Sequences in their order; and sums of shared budgets against budgets that are shared out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.line import Line
from scheduler.policies.base import Draft, fill_with_chunks
from scheduler.policies.sharing import Sharing
from scheduler.request import Phase, Request, Sequence
from scheduler.roofline import Features
from scheduler.slo import UNPROMISED


def sequence(order: int, prompt: int = 1, computed: int = 0) -> Sequence:
    tokens = tuple(range(prompt))
    return Sequence(
        Request(f"r{order}", tokens, 4),
        arrival=0.0,
        order=order,
        tokens=list(tokens),
        promise=UNPROMISED,
        phase=Phase.RUNNING,
        computed=computed,
        prefill_target=prompt,
    )


@given(st.permutations(range(12)), st.data())
def test_a_line_is_in_order_whoever_comes_back_and_whoever_leaves(orders: list[int], data: st.DataObject) -> None:
    line = Line()
    sequences = {order: sequence(order) for order in orders}
    for order in orders:
        line.join(sequences[order])
    assert [s.order for s in line] == sorted(orders)
    for order in data.draw(st.permutations(orders)):
        line.leave(sequences[order])
        assert sequences[order] not in line
    with pytest.raises(ValueError, match="'r3' is not in this line"):
        line.leave(sequences[3])


def shared_out(prefills: list[Sequence], budget: int) -> list[Draft]:
    """In order, but that the oldest keeps an eighth of the budget, at least a token, and what the others leave."""
    oldest = min(prefills, key=lambda s: s.order)
    if budget <= 0 or prefills[0] is oldest:
        return fill_with_chunks(prefills, budget)
    kept = min(max(1, budget // 8), oldest.prefill_remaining)
    others = fill_with_chunks([s for s in prefills if s is not oldest], budget - kept)
    left = budget - sum(draft.count for draft in others)
    return [*others, Draft(oldest, min(left, oldest.prefill_remaining))]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.integers(0, 200),
    st.integers(0, 40),
)
def test_a_shared_budget_is_what_it_comes_to(
    sizes: list[tuple[int, int]], order: random.Random, cap: int, streams: int
) -> None:
    prefills = [sequence(k, done + left, done) for k, (done, left) in enumerate(sizes)]
    order.shuffle(prefills)
    decodes = Features(decodes=streams, decode_context=streams * 9)
    wanted = sum(s.prefill_remaining for s in prefills)
    sharing = Sharing(prefills, min(cap, wanted), decodes)
    for budget in range(min(cap, wanted) + 1):
        drafts = shared_out(prefills, budget)
        assert sharing.chunks(budget) == drafts
        assert sum(draft.count for draft in drafts) == budget
        expected = decodes
        for draft in drafts:
            expected = expected.with_chunk(draft.sequence.prefill_offset, draft.count)
        share = sharing.of(budget)
        completed = sharing.completable[: share.completed]
        if share.completes_aside:
            assert sharing.aside is not None
            completed.append(sharing.aside)
        assert share.features == expected
        assert completed == [draft.sequence for draft in drafts if draft.count == draft.sequence.prefill_remaining]
