"""Which prompt `slo` computes first: by deadline, or by least laxity; and who yields to whom."""

from __future__ import annotations

from typing import get_args

import pytest

from scheduler.policies import PrefillOrder
from scheduler.policies.slo import SloSettings
from scheduler.request import Request
from scheduler.slo import Promise
from tests.scheduler.virtual import VirtualRun, prompt

ORDERS = get_args(PrefillOrder)


@pytest.mark.parametrize("order", ORDERS)
def test_the_prompt_in_a_hurry_goes_first(order: PrefillOrder) -> None:
    run = VirtualRun.with_policy(SloSettings(max_batched_tokens=256, prefill_order=order))
    run.add(Request("patient", prompt(1500), 1, promise=Promise(600, 1)))
    run.add(Request("urgent", prompt(400), 1, promise=Promise(3, 1)))
    run.drain()
    assert run.times["urgent"][0] < run.times["patient"][0]
    assert run.times["urgent"][0] <= 3


@pytest.mark.parametrize(("order", "first"), [("deadline", "short"), ("laxity", "long")])
def test_of_two_that_can_be_in_time(order: PrefillOrder, first: str) -> None:
    """The long one is due later, and yet has less time to spare. Both are in time either way."""
    run = VirtualRun.with_policy(SloSettings(max_batched_tokens=256, prefill_order=order))
    due, tokens = {"short": 11.0, "long": 12.0}, {"short": 200, "long": 2000}
    for name, seconds in due.items():
        run.add(Request(name, prompt(tokens[name]), 2, promise=Promise(seconds, 1)))
    run.step()
    done = {sequence.request_id: sequence.prefill_offset for sequence in run.scheduler.running}
    rest = 256 // 32 if first == "long" else 56  # the oldest prompt has its share in any case
    assert done == {first: 256 - rest} | {name: rest for name in due if name != first}
    run.drain()
    assert all(run.times[name][0] <= seconds for name, seconds in due.items())


@pytest.mark.parametrize("order", ORDERS)
def test_one_that_is_hopeless_yields_and_is_served_all_the_same(order: PrefillOrder) -> None:
    run = VirtualRun.with_policy(SloSettings(max_batched_tokens=256, prefill_order=order))
    run.add(Request("hopeless", prompt(3000), 1, promise=Promise(0.5, 1)))
    arrivals = {k * 12: Request(f"h{k}", prompt(500), 1, promise=Promise(4, 1)) for k in range(6)}
    due = {}
    for k in range(200):
        if k in arrivals:
            due[arrivals[k].request_id] = run.now + 4
            run.add(arrivals[k])
        if run.step() is None and k > max(arrivals):
            break
    assert "hopeless" in run.ended
    assert all(run.times[name][0] <= time for name, time in due.items())
