"""Promises that follow from measured workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.tuning import Tuning, by_role, gate_for, policy_for, promise_book
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.policies.slo import SloPolicy
from scheduler.roofline import Features
from scheduler.slo import LONGEST_PROMISE_S, PromiseBook

SLOW = OnlineCostModel(Coefficients(0.0237, 0.03, 0.00198, 6e-6, 3e-7, 1e-4, 1.0, 2e-5, 0.01))


def test_a_prompt_that_takes_more_than_a_day_is_promised_the_longest_there_is() -> None:
    book = promise_book(EngineConfig(), SLOW)
    assert book.promise(100_000).ttft_s == LONGEST_PROMISE_S
    assert book.promise(100).ttft_s < book.promise(1000).ttft_s < LONGEST_PROMISE_S


def test_groups_that_generate_are_not_thought_slow_for_ever_by_those_that_compute_prompts() -> None:
    """A newcomer is judged by the group that computes its prompt, and none that is refused shows what is over."""
    prefill, decode = (
        Tuning(OnlineCostModel(SLOW.base), PromiseBook()),
        Tuning(OnlineCostModel(SLOW.base), PromiseBook()),
    )
    tuned = by_role(EngineConfig(), prefill, decode)["prefill"]
    iteration = Features(decodes=8, decode_context=800)
    for _ in range(50):
        decode.cost.observe(iteration, 3.5 * SLOW.base.predict(iteration), ended=100.0)
    gate = gate_for(EngineConfig(on_infeasible="reject"), "slo", tuned)
    assert gate is not None
    gate.relax(101.0)
    assert decode.cost.correction > 3, "it ran a moment ago"
    gate.relax(161.0)
    assert decode.cost.correction < 1.1


@pytest.mark.parametrize("order", ["deadline", "laxity"])
def test_which_prompt_is_computed_first_is_an_option(order: Any) -> None:
    tuning, machine = Tuning(OnlineCostModel(SLOW.base), PromiseBook()), SimpleNamespace(device="cpu")
    policy = policy_for(EngineConfig(prefill_order=order), "slo", 512, machine, tuning)  # type: ignore[arg-type]
    assert isinstance(policy, SloPolicy)
    assert policy.budget.settings.prefill_order == order
