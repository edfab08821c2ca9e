"""A machine on which streams and prompts are off by different factors, and one that changes its speed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.budget import Decision
from scheduler.correction import Correction
from scheduler.costmodel import OnlineCostModel
from scheduler.policies.base import Draft, Mix
from scheduler.policies.pace import Pace
from scheduler.request import Request, Sequence
from scheduler.roofline import Features
from scheduler.slo import Promise
from tests.scheduler.test_costmodel import TRUTH

STREAMS = Features(decodes=8, decode_context=1000)
MIXED = [STREAMS.with_chunk(offset, count) for offset, count in ((0, 16), (1000, 4), (500, 64), (200, 128))]


def took(f: Features, streams: float, prompts: float) -> float:
    plain = TRUTH.predict(STREAMS)
    return streams * plain + prompts * (TRUTH.predict(f) - plain)


def shown(model: OnlineCostModel, kinds: list[Features], count: int, streams: float, prompts: float) -> None:
    """So many iterations of these kinds, that scatter by 5 %."""
    rnd = random.Random(1)
    for _ in range(count):
        f = rnd.choice(kinds)
        model.observe(f, took(f, streams, prompts) * rnd.gauss(1.0, 0.05))


def off(model: OnlineCostModel, f: Features, streams: float, prompts: float) -> float:
    return abs(model.predict(f) / took(f, streams, prompts) - 1)


@pytest.mark.parametrize(("streams", "prompts"), [(1.4, 0.9), (0.7, 1.2), (1.0, 1.0)])
def test_what_streams_and_what_prompts_take_is_told_apart(streams: float, prompts: float) -> None:
    model = OnlineCostModel(TRUTH)
    shown(model, [STREAMS, *MIXED], 200, streams, prompts)
    for f in (STREAMS, *MIXED, STREAMS.with_chunk(700, 256)):
        assert off(model, f, streams, prompts) < 0.08


def test_many_iterations_without_prompts_leave_what_prompts_take_alone() -> None:
    """One factor for both would be that of the streams, and every prompt thought to take half as long again."""
    model = OnlineCostModel(TRUTH)
    shown(model, [STREAMS, *MIXED], 200, 1.5, 1.0)
    shown(model, [STREAMS], 2000, 1.5, 1.0)
    assert all(off(model, f, 1.5, 1.0) < 0.15 for f in (STREAMS, *MIXED))


@pytest.mark.parametrize("seen", [[STREAMS], [MIXED[2]]], ids=["by streams", "by prompts"])
def test_a_machine_that_becomes_half_as_fast_is_followed_for_both_by_either(seen: list[Features]) -> None:
    model = OnlineCostModel(TRUTH)
    shown(model, [STREAMS, *MIXED], 300, 1.0, 1.0)
    shown(model, seen, 14, 2.0, 2.0)
    assert all(off(model, f, 2.0, 2.0) < 0.2 for f in (STREAMS, *MIXED))


@given(st.lists(st.tuples(st.sampled_from([STREAMS, *MIXED]), st.floats(1e-6, 1e6)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_nothing_that_is_seen_takes_it_out_of_bounds(iterations: list[tuple[Features, float]]) -> None:
    model = OnlineCostModel(TRUTH)
    for f, seconds in iterations:
        model.observe(f, seconds)
    plain = model.predict(STREAMS)
    assert TRUTH.predict(STREAMS) / 4.001 < plain < 4.001 * TRUTH.predict(STREAMS)
    assert all(math.isfinite(model.predict(f)) and model.predict(f) > plain for f in MIXED)


def test_without_a_step_nothing_is_learned() -> None:
    fixed = Correction(step=0.0, limit=4.0)
    for _ in range(10):
        fixed.learn(1.0, 2.0, 3.0)
    assert fixed.of(1.0, 2.0) == 2.0


def test_iterations_that_had_no_room_for_prompts_tell_how_those_scatter() -> None:
    """Or a few that took long would keep all prompts out for as long as it takes until hundreds have got in."""

    def allowed_after(starved: bool) -> float:
        model = OnlineCostModel(TRUTH)
        for k in range(100):
            model.observe(MIXED[0], TRUTH.predict(MIXED[0]) * (2.0 if k % 20 == 10 else 1.0))
        for _ in range(600):
            model.observe(STREAMS, TRUTH.predict(STREAMS), starved=starved)
        usual = model.predict(STREAMS)
        return model.allowance(0.99).of(usual) / usual

    assert allowed_after(starved=True) == pytest.approx(1.0)
    assert allowed_after(starved=False) > 1.3


def test_what_a_slow_machine_taught_of_prompts_is_forgotten_too() -> None:
    """Or who is refused because of it could never find out."""
    model = OnlineCostModel(TRUTH)
    for at in range(100):
        for f in (STREAMS, *MIXED):
            model.observe(f, took(f, 1.0, 1.9), ended=float(at))
    assert model.of_prompts > 1.7
    model.relax(200.0)
    assert all(model.predict(f) < 1.05 * TRUTH.predict(f) for f in MIXED)


@pytest.mark.parametrize(("streams", "prompts"), [(1.4, 0.9), (2.0, 0.8), (0.7, 1.2), (1.0, 1.9)])
def test_how_long_the_rest_of_a_prompt_takes_is_told_by_both_factors(streams: float, prompts: float) -> None:
    model = OnlineCostModel(TRUTH)
    shown(model, [STREAMS, *MIXED], 400, streams, prompts)
    pace = Pace(model)
    request = Request("r", (1,) * 64, 1)
    sequence = Sequence(request=request, arrival=0.0, order=0, tokens=[1] * 64, promise=Promise(1.0, 1.0))
    for _ in range(200):
        chunk = Draft(sequence, 64)
        pace.learn(Mix((), (chunk,), STREAMS.with_chunk(0, 64)), Decision(64, "deadline"))
    assert pace.rest_of(sequence) == pytest.approx(took(STREAMS.with_chunk(0, 64), streams, prompts), rel=0.15)
