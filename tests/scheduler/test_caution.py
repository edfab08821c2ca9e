"""What forecasts are multiplied by, learned from promises kept and missed."""

from __future__ import annotations

import random

import pytest

from scheduler.caution import LEAST, MOST, OWN, OWN_S, Caution, own
from scheduler.costmodel import OnlineCostModel
from scheduler.roofline import Features
from tests.scheduler.virtual import COST


@pytest.mark.parametrize("usual", [0.8, 1.0, 1.6])
def test_few_are_missed_however_forecasts_are(usual: float) -> None:
    """First tokens come after `usual` times the forecast, and scatter; who is promised no more than allowed for by the
    caution is refused."""
    draw, caution = random.Random(4), Caution()
    missed = admitted = 0
    for number in range(4000):
        promised = draw.uniform(1.0, 5.0)
        if caution.factor > promised:
            continue
        kept = usual * draw.lognormvariate(0, 0.3) <= promised
        caution.learn(kept, float(number))
        if number > 500:
            admitted, missed = admitted + 1, missed + (not kept)
    assert admitted > 1000
    assert missed <= 0.05 * admitted


def test_it_has_bounds_and_is_forgotten() -> None:
    caution = Caution()
    for _ in range(100):
        caution.learn(kept=False, now=0.0)
    assert caution.factor == pytest.approx(MOST)
    caution.look(30.0, quiet=False)
    assert caution.factor == pytest.approx(MOST), "prompts were there"
    caution.look(90.0, quiet=True)
    assert caution.factor == pytest.approx(LEAST, rel=0.01)
    for _ in range(100):
        caution.learn(kept=True, now=90.0)
    assert caution.factor == pytest.approx(LEAST)


def test_what_a_prompt_takes_alone_is_known_better_than_what_others_take() -> None:
    caution = Caution()
    assert caution.of(0.05, 0.05) == pytest.approx(LEAST * 0.05), "of a short one any disturbance is a large part"
    assert caution.of(2.0, 2.0) == pytest.approx(own(2.0)) == pytest.approx(OWN * 2.0 + OWN_S)
    assert caution.of(5.0, 2.0) == pytest.approx(own(2.0) + LEAST * 3.0)
    assert caution.of(1.0, 2.0) == pytest.approx(own(1.0)), "some of it is there already"
    caution.learn(kept=False, now=0.0)
    assert caution.of(2.0, 2.0) > 1.2 * own(2.0), "what was missed counts for all of it"


def test_a_machine_that_was_slow_is_tried_again_when_nothing_runs() -> None:
    """Who is refused because of it runs no iteration that would show that it is over."""
    cost, iteration = OnlineCostModel(COST), Features(decodes=8, decode_context=800)
    for _ in range(50):
        cost.observe(iteration, 3.5 * COST.predict(iteration), ended=100.0)
    slow = cost.predict(iteration)
    assert slow > 3 * COST.predict(iteration)
    cost.relax(160.0)
    assert cost.predict(iteration) < 1.1 * COST.predict(iteration)
    for _ in range(50):
        cost.observe(iteration, 3.5 * COST.predict(iteration), ended=200.0)
    slow = cost.predict(iteration)
    cost.relax(190.0)
    assert cost.predict(iteration) == slow, "for whom nothing ran is not all who share it: another group ran until now"
    for _ in range(50):
        cost.observe(iteration, 0.5 * COST.predict(iteration), ended=200.0)
    fast = cost.predict(iteration)
    cost.relax(260.0)
    assert cost.predict(iteration) == fast, "of a fast one there is nothing to find out"
