"""Sequences in their order; and sums of shared budgets against budgets that are shared out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.line import FairLine, Line
from scheduler.policies.base import Draft, fill_with_chunks
from scheduler.policies.sharing import OLDEST_PART, Sharing
from scheduler.request import Phase, Request, Sequence
from scheduler.roofline import Features
from scheduler.slo import UNPROMISED


def sequence(order: int, prompt: int = 1, computed: int = 0) -> Sequence:
    tokens = tuple(range(prompt))
    made = Sequence(
        request=Request(f"r{order}", tokens, 4),
        arrival=0.0,
        order=order,
        tokens=list(tokens),
        promise=UNPROMISED,
        phase=Phase.RUNNING,
        prefill_target=prompt,
    )
    made.computed = computed
    return made


@given(st.permutations(range(12)), st.data())
def test_a_line_is_in_order_whoever_comes_back_and_whoever_leaves(orders: list[int], data: st.DataObject) -> None:
    line = Line()
    sequences = {order: sequence(order) for order in orders}
    for order in orders:
        line.join(sequences[order])
    assert [s.order for s in line] == sorted(orders)
    for order in data.draw(st.permutations(orders)):
        assert line.tokens == sum(len(s.tokens) for s in line)
        line.leave(sequences[order])
        assert sequences[order] not in line
    assert line.tokens == 0
    with pytest.raises(ValueError, match="'r3' is not in this line"):
        line.leave(sequences[3])


def of_tenant(order: int, tenant: str, tokens: int, weight: float) -> Sequence:
    made = sequence(order, tokens)
    return replace(made, request=replace(made.request, tenant=tenant, weight=weight))


arrivals = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)) | st.none(), max_size=60)


@given(arrivals, st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in "abc"}))
def test_while_tenants_wait_what_they_get_follows_their_weights(
    arrivals: list[tuple[str, int] | None], weights: dict[str, float]
) -> None:
    """The bound of start-time fair queueing: over any time in which two tenants have something waiting, what they got
    by weight differs by no more than a request of each. None stands for a sequence that enters."""
    line, waiting, entered = FairLine(), dict.fromkeys("abc", 0), []
    longest = {
        tenant: max((tokens for who, tokens in filter(None, arrivals) if who == tenant), default=0) + 4
        for tenant in "abc"
    }
    since = dict.fromkeys(combinations("abc", 2), (0.0, 0.0))
    got = dict.fromkeys("abc", 0.0)
    for order, arrival in enumerate([*arrivals, *[None] * len(arrivals)]):
        if arrival is not None:
            line.join(of_tenant(order, arrival[0], arrival[1], weights[arrival[0]]))
            waiting[arrival[0]] += 1
        elif (first := line.first()) is not None:
            assert next(line.in_turn()) is first
            line.enter(first)
            entered.append(first)
            tenant = first.request.tenant
            waiting[tenant] -= 1
            got[tenant] += first.final_length / weights[tenant]
        for a, b in since:
            if not (waiting[a] and waiting[b]):
                since[a, b] = got[a], got[b]
            more = got[a] - since[a, b][0] - (got[b] - since[a, b][1])
            assert abs(more) <= longest[a] / weights[a] + longest[b] / weights[b] + 1e-6
    for tenant in "abc":
        orders = [s.order for s in entered if s.request.tenant == tenant]
        assert orders == sorted(orders), "first come, first served within a tenant"
    assert len(entered) == len([arrival for arrival in arrivals if arrival])


@given(st.lists(st.integers(1, 50) | st.none(), max_size=40), st.data())
def test_a_single_tenant_is_served_in_the_order_of_arrival(arrivals: list[int | None], data: st.DataObject) -> None:
    """Also where some give up, and some come back after a preemption: as in a plain line."""
    plain, fair, away = Line(), FairLine(), []
    for order, tokens in enumerate(arrivals):
        if tokens is not None:
            plain.join(made := of_tenant(order, "", tokens, 1.0))
            fair.join(made)
        elif plain:
            leaving = plain[0] if data.draw(st.booleans()) else data.draw(st.sampled_from(plain))
            plain.leave(leaving)
            if leaving is fair.first():
                fair.enter(leaving)
            else:
                fair.leave(leaving)
            away.append(leaving)
        elif away:
            plain.join(back := away.pop())
            fair.join(back)
        assert list(fair) == list(fair.in_turn()) == list(plain)
        assert fair.first() == plain.first()


def shared_out(prefills: list[Sequence], budget: int) -> list[Draft]:
    """In order, but that the oldest keeps a part of the budget, at least a token, and what the others leave."""
    oldest = min(prefills, key=lambda s: s.order)
    if budget <= 0 or prefills[0] is oldest:
        return fill_with_chunks(prefills, budget)
    kept = min(max(1, budget // OLDEST_PART), oldest.prefill_remaining)
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
