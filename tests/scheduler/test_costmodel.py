"""The fitted cost model: what it recovers, how it is corrected online, and what it cannot be told by outliers."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.costmodel import Coefficients, OnlineCostModel, Sample, fit
from scheduler.roofline import Features

TRUTH = Coefficients(
    overhead=0.002, read=0.04, per_token=0.0025, per_context=1e-6, per_pair=1e-7, per_sequence=1e-4, norm=2.0
)


def features(decodes: int, context: int, chunk: int, offset: int) -> Features:
    return Features(decodes=decodes, decode_context=decodes * context).with_chunk(offset, chunk)


GRID = [
    *(features(b, s, 0, 0) for b in (1, 8, 32) for s in (64, 512, 2048)),
    *(features(0, 0, c, o) for c in (16, 64, 128, 256, 512) for o in (0, 1024)),
    *(features(8, 128, c, o) for c in (16, 64, 256) for o in (0, 512)),
]
SHAPES = ((4, 300, 100, 200), (20, 700, 0, 0), (2, 64, 400, 50), (12, 90, 30, 0))
UNSEEN = [features(*shape) for shape in SHAPES]


def test_a_fit_recovers_what_made_the_samples() -> None:
    found = fit([Sample(f, TRUTH.predict(f)) for f in GRID])
    for f in (*GRID, *UNSEEN):
        assert found.predict(f) == pytest.approx(TRUTH.predict(f), rel=0.03)


def test_a_fit_of_noisy_samples_is_unbiased_and_close_on_unseen_iterations() -> None:
    rnd = random.Random(0)
    noisy = [Sample(f, TRUTH.predict(f) * rnd.gauss(1, 0.08)) for f in GRID for _ in range(4)]
    found = fit(noisy)
    ratios = [found.predict(f) / TRUTH.predict(f) for f in UNSEEN]
    assert all(0.9 < ratio < 1.1 for ratio in ratios)
    assert abs(statistics.mean(found.predict(s.features) / s.seconds for s in noisy) - 1) < 0.05


coefficients = st.builds(
    Coefficients,
    overhead=st.floats(0, 0.01),
    read=st.floats(0.001, 0.1),
    per_token=st.floats(1e-5, 0.005),
    per_context=st.floats(0, 2e-5),
    per_pair=st.floats(0, 1e-6),
    per_sequence=st.floats(0, 1e-3),
    norm=st.sampled_from([1.0, 2.0, 3.0]),
)


@settings(max_examples=25, deadline=None)
@given(coefficients)
def test_no_coefficient_is_negative_and_the_error_is_small(truth: Coefficients) -> None:
    found = fit([Sample(f, truth.predict(f)) for f in GRID])
    assert all(value >= 0 for value in found.as_dict().values())
    errors = [abs(found.predict(f) / truth.predict(f) - 1) for f in GRID]
    assert statistics.median(errors) < 0.05


def test_too_little_to_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 4 iterations"):
        fit([Sample(GRID[0], 1.0)] * 3)
    with pytest.raises(ValueError, match="positive duration"):
        fit([Sample(GRID[0], 0.0)] * 5)


@pytest.mark.parametrize("drift", [0.6, 1.7])
def test_a_machine_that_changes_is_followed(drift: float) -> None:
    model = OnlineCostModel(TRUTH)
    f = GRID[3]
    for _ in range(300):
        model.observe(f, TRUTH.predict(f) * drift)
    assert model.predict(f) == pytest.approx(TRUTH.predict(f) * drift, rel=0.02)


def test_an_outlier_moves_it_no_more_than_a_surprise() -> None:
    model = OnlineCostModel(TRUTH)
    f = GRID[3]
    ratio = model.observe(f, TRUTH.predict(f) * 1000)
    assert ratio == pytest.approx(1000)
    assert model.correction <= 1.5**0.2 + 1e-9
    for _ in range(10_000):
        model.observe(f, 1e9)
    assert model.correction <= 4.0, "bounded for ever"


def scattered(model: OnlineCostModel, level: float, count: int, spread: float = 0.0) -> None:
    """Iterations that take `level` times what the true model says, up to `spread` more or less, in no order."""
    f = GRID[3]
    for k in range(count):
        noise = ((k * 37) % 100) / 50 - 1  # each of 100 steps from -1 to 1 as often
        model.observe(f, TRUTH.predict(f) * level * (1.0 + spread * noise))


def allowed(model: OnlineCostModel, quantile: float, f: Features = GRID[3]) -> float:
    """By what factor an iteration may exceed its prediction."""
    predicted = model.predict(f)
    return model.allowance(quantile).of(predicted) / predicted


def test_what_is_allowed_for_is_the_quantile_of_the_scatter() -> None:
    model = OnlineCostModel(TRUTH)
    assert allowed(model, 0.95) == 1.0, "nothing is known yet"
    scattered(model, 1.0, 300, spread=0.3)
    assert 1.2 < allowed(model, 0.95) < 1.45
    assert allowed(model, 0.5) < 1.1, "half of them stay within, but for what the correction is behind just now"
    calm = OnlineCostModel(TRUTH)
    scattered(calm, 0.5, 50)
    assert allowed(calm, 0.99) == 1.0, "never below the prediction"


def test_a_new_speed_is_no_scatter() -> None:
    model = OnlineCostModel(TRUTH)
    for level in (1.0, 2.0, 1.0):
        scattered(model, level, 60, spread=0.05)
    assert allowed(model, 0.99) < 1.15


def test_a_rare_spike_is_allowed_for_where_the_quantile_asks() -> None:
    model = OnlineCostModel(TRUTH)
    f = GRID[3]
    for k in range(300):
        model.observe(f, TRUTH.predict(f) * (2.0 if k % 25 == 0 else 1.0))
    assert allowed(model, 0.99) == pytest.approx(2.0)
    assert allowed(model, 0.9) == pytest.approx(1.0)


@given(st.integers(30, 300), st.floats(0, 1), st.floats(1.5, 100.0), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
@settings(max_examples=50, deadline=None)
def test_a_single_outlier_decides_nothing(count: int, when: float, ratio: float, quantile: float) -> None:
    """However few there are that tell how iterations scatter, and whatever is asked of them; two of as few do."""

    def margin(outliers: set[int]) -> float:
        model = OnlineCostModel(TRUTH, step=0.0)
        for k in range(count):
            model.observe(GRID[3], TRUTH.predict(GRID[3]) * (ratio if k in outliers else 1.0))
        return allowed(model, quantile)

    outlier = round(when * (count - 6))  # what came just now is not yet caught up with
    assert margin({outlier}) == pytest.approx(1.0)
    few = quantile >= 0.99 and count < 100
    assert not few or margin({10, 18}) == pytest.approx(ratio)


def test_what_is_out_of_the_window_is_forgotten() -> None:
    model = OnlineCostModel(TRUTH, window=50)
    scattered(model, 1.0, 100, spread=0.5)
    scattered(model, 1.0, 100)
    assert allowed(model, 0.99) == pytest.approx(1.0)


def test_what_is_allowed_for_is_that_of_iterations_with_prompts_once_there_are_enough() -> None:
    """A disturbance of so many milliseconds is a larger share of the short iterations without."""
    model = OnlineCostModel(TRUTH)
    decodes = Features(decodes=8)
    mixed = decodes.with_chunk(0, 64)
    for k in range(200):
        late = 0.03 if k % 20 == 19 else 0.0
        model.observe(decodes, TRUTH.predict(decodes) + late)
    of_all = allowed(model, 0.99, mixed)
    for k in range(200):
        late = 0.03 if k % 20 == 19 else 0.0
        model.observe(mixed, TRUTH.predict(mixed) + late)
        model.observe(decodes, TRUTH.predict(decodes) + late)
    assert 1 < allowed(model, 0.99, mixed) < of_all


@pytest.mark.parametrize("by_seconds", [True, False])
def test_beyond_the_lengths_that_there_were_the_smaller_allowance_holds(by_seconds: bool) -> None:
    """Seen at short iterations, 30 ms more are no factor for long ones; seen at long ones, a factor is no 30 ms."""
    model = OnlineCostModel(TRUTH, step=0.0)
    short, long = Features(decodes=8).with_chunk(0, 16), Features(decodes=8).with_chunk(0, 2048)
    seen, other = (short, long) if by_seconds else (long, short)
    usual = TRUTH.predict(seen)
    for k in range(200):
        model.observe(seen, usual * (1.5 if k % 20 == 10 else 1.0))
    allowance = model.allowance(0.99)
    assert allowance.of(usual) == pytest.approx(1.5 * usual)
    predicted = TRUTH.predict(other)
    expected = predicted + usual / 2 if by_seconds else 1.5 * predicted
    assert allowance.of(predicted) == pytest.approx(expected)
    assert allowance.of(predicted) < max(predicted + usual / 2, 1.5 * predicted) / 1.1
