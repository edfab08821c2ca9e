"""The dual-SLO solver against stepping the iterations, and its boundaries from both sides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.costmodel import Coefficients, CostModel
from scheduler.hardware import gpu
from scheduler.roofline import Features, Roofline
from scheduler.search import largest, smallest
from scheduler.shapes import known_shape
from scheduler.solver import Load, Solver, Targets

LAPTOP = Coefficients(
    overhead=0.002, read=0.04, per_token=0.0025, per_context=1e-6, per_pair=1e-7, per_sequence=1e-4, norm=2.0
)
MODELS: list[CostModel] = [
    LAPTOP,
    Roofline(known_shape("Llama-3.1-8B"), gpu("a100-80").hardware),
    Roofline(known_shape("Llama-3.1-70B"), gpu("h100").hardware, tp=4),
]
costs = st.sampled_from(MODELS)
loads = st.builds(
    Load,
    prompt=st.integers(1, 5000),
    decodes=st.integers(0, 64),
    context=st.integers(0, 4000),
    rate=st.sampled_from([0.0, 0.05, 0.5]),
)
targets_of = st.builds(Targets, ttft_s=st.floats(0.02, 60), tpot_s=st.floats(0.005, 2))


def stepped(cost: CostModel, load: Load, chunk: int) -> tuple[float, float]:
    """TTFT without a queue, and the longest iteration, by running the prompt chunk by chunk."""
    times = []
    start = 0
    while start < load.prompt:
        count = min(chunk, load.prompt - start)
        f = Features(decodes=load.decodes, decode_context=load.decodes * load.context).with_chunk(start, count)
        times.append(cost.predict(f))
        start += count
    return sum(times), max(times)


def longest_possible(cost: CostModel, load: Load, chunk: int) -> float:
    """The longest iteration of a full chunk, wherever in the prompt it stands."""
    decodes = Features(decodes=load.decodes, decode_context=load.decodes * load.context)
    return max(cost.predict(decodes.with_chunk(start, chunk)) for start in range(load.prompt - chunk + 1))


def keeps(cost: CostModel, load: Load, targets: Targets, chunk: int) -> bool:
    service, _ = stepped(cost, load, chunk)
    longest = longest_possible(cost, load, chunk)
    rho = load.rate * service
    wait = math.inf if rho >= 1 else rho * service / (2 * (1 - rho))
    return longest <= targets.tpot_s and service + wait <= targets.ttft_s


@settings(max_examples=80, deadline=None)
@given(costs, loads, st.integers(1, 5000))
def test_the_closed_forms_are_what_stepping_gives(cost: CostModel, load: Load, chunk: int) -> None:
    solver = Solver(cost)
    service, longest = stepped(cost, load, chunk)
    assert solver.prefill(load, chunk) == pytest.approx(service)
    assert solver.tpot(load, chunk) >= longest * (1 - 1e-12)
    if load.prompt % chunk == 0 or chunk >= load.prompt:
        assert solver.tpot(load, chunk) == pytest.approx(longest)


@settings(max_examples=60, deadline=None)
@given(costs, loads.filter(lambda load: load.prompt <= 400), targets_of)
def test_the_verdict_is_what_trying_every_chunk_gives(cost: CostModel, load: Load, targets: Targets) -> None:
    tile = cost.hardware.tile if isinstance(cost, Roofline) else 1
    verdict = Solver(cost, tile=tile).solve(load, targets)
    kept = [c for c in range(1, load.prompt + 1) if keeps(cost, load, targets, c)]
    assert verdict.feasible == bool(kept)
    if verdict.chunk_range is not None:
        c_min, c_max = verdict.chunk_range
        assert c_max == max(kept)
        assert c_min in kept
        assert verdict.chunk in kept


@settings(max_examples=80, deadline=None)
@given(costs, loads, targets_of, st.floats(1.0, 4.0))
def test_monotone_in_every_promise(cost: CostModel, load: Load, targets: Targets, factor: float) -> None:
    solver = Solver(cost)
    if solver.feasible(load, targets):
        assert solver.feasible(load, replace(targets, ttft_s=targets.ttft_s * factor))
        assert solver.feasible(load, replace(targets, tpot_s=targets.tpot_s * factor))


@settings(max_examples=80, deadline=None)
@given(costs, loads, targets_of)
def test_the_ways_out_lead_out_and_one_step_less_does_not(cost: CostModel, load: Load, targets: Targets) -> None:
    solver = Solver(cost)
    verdict = solver.solve(load, targets)
    if verdict.feasible:
        return
    tpot = solver.relaxed_tpot(load, targets)
    if tpot is not None:
        assert solver.feasible(load, replace(targets, tpot_s=tpot))
        assert not solver.feasible(load, replace(targets, tpot_s=tpot * (1 - 1e-6)))
    ttft = solver.relaxed_ttft(load, targets)
    if ttft is not None:
        assert solver.feasible(load, replace(targets, ttft_s=ttft))
        assert not solver.feasible(load, replace(targets, ttft_s=ttft * (1 - 1e-6)))
    decodes = solver.most_decodes(load, targets)
    if decodes is not None:
        assert decodes < load.decodes
        assert solver.feasible(replace(load, decodes=decodes), targets)
        assert not solver.feasible(replace(load, decodes=decodes + 1), targets)


def test_binding_names_the_promise_that_fails() -> None:
    solver = Solver(LAPTOP)
    load = Load(prompt=2048, decodes=8, context=128)
    assert solver.solve(load, Targets(ttft_s=60, tpot_s=0.01)).binding == "tpot"
    short = solver.solve(load, Targets(ttft_s=1, tpot_s=0.2))
    assert (short.feasible, short.binding, short.chunk_range) == (False, "ttft", None)
    good = solver.solve(load, Targets(ttft_s=12, tpot_s=0.25))
    assert good.feasible
    assert good.ttft_s <= 12
    assert good.tpot_s <= 0.25


def test_arrivals_faster_than_service_never_meet_a_ttft() -> None:
    solver = Solver(LAPTOP)
    load = Load(prompt=2048, decodes=0, context=0, rate=1.0)
    verdict = solver.solve(load, Targets(ttft_s=1000, tpot_s=100))
    assert not verdict.feasible
    assert verdict.ttft_s == math.inf
    assert solver.relaxed_ttft(load, Targets(ttft_s=1000, tpot_s=100)) is None


def test_what_is_no_load_and_no_target() -> None:
    with pytest.raises(ValueError, match="not a load"):
        Load(prompt=0, decodes=1, context=1)
    with pytest.raises(ValueError, match="must be above 0"):
        Targets(ttft_s=0, tpot_s=1)


@given(st.integers(0, 100), st.integers(0, 100))
def test_bisection(boundary: int, high: int) -> None:
    assert largest(lambda n: n <= boundary, high) == min(boundary, high)
    assert smallest(lambda n: n >= boundary, 0, max(high, boundary)) == boundary
