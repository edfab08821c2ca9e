"""The searches over simulations: against a capacity that is known, and on a small cluster."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import EngineConfig
from cluster.simulated.capacity import TOLERANCE, Criterion, capacity
from cluster.simulated.cheapest import Kind, cheapest
from cluster.simulated.cluster import simulate
from cluster.simulated.machine import by_hardware
from cluster.simulated.seen import SeenIterations, SeenRequest, Simulation
from cluster.workloads import Fixed, OpenLoop, PlannedRequest, RandomPrompt, poisson, requests
from scheduler.hardware import gpu
from scheduler.shapes import known_shape
from scheduler.slo import Promise

PLANNED = PlannedRequest(RandomPrompt(10, "any"), 2)
KEEPS, MISSES = array("d", [0.5, 0.6]), array("d", [5.0, 5.1])


def run_of(kept: int, missed: int) -> Simulation:
    seen = [
        SeenRequest(PLANNED, 0.0, 10, Promise(1.0, 0.2), 0.0, tokens, tokens[-1])
        for tokens in [KEEPS] * kept + [MISSES] * missed
    ]
    return Simulation(seen, SeenIterations(), 6.0, 1, 1)


@settings(deadline=None)
@given(st.floats(0.05, 2000), st.floats(0.1, 50), st.integers(1, 3))
def test_the_bisection_finds_a_known_capacity(true: float, guess: float, seeds: int) -> None:
    found = capacity(lambda rate, seed: run_of(95, 5 if rate <= true else 50), Criterion(0.9), range(seeds), guess)
    for of in found.seeds:
        assert of.rate <= true * (1 + 1e-9)
        assert of.above > true * (1 - 1e-9)
        assert of.above <= of.rate * (1 + TOLERANCE) * (1 + 1e-9)
        assert of.runs <= 40
        assert "TTFT missed by 50" in of.broken
    assert (found.margin is None) == (seeds == 1)


def test_what_never_holds_has_no_capacity_and_says_why() -> None:
    found = capacity(lambda rate, seed: run_of(0, 10), Criterion(0.9), range(1))
    assert found.rate == 0
    assert "TTFT" in found.seeds[0].broken


def test_the_form_with_time_between_tokens_and_delay() -> None:
    run = run_of(10, 0)
    assert Criterion(tbt_s=0.11, delay_s=2).broken(run) == ""
    assert "P99 time between tokens 100 ms" in Criterion(tbt_s=0.09).broken(run)
    run.requests[0].scheduled = None
    assert Criterion(delay_s=1).broken(run) == "", "the median is another one's"
    with pytest.raises(ValueError, match="something that is to hold"):
        Criterion()


def test_the_cheapest_is_found_with_reasons() -> None:
    needed = {"A": 7, "B": 3, "C": 10**6}

    def try_out(kind: Kind, groups: int) -> Simulation:
        if kind.tp == 2:
            raise ValueError("does not fit")
        return run_of(10, 0 if groups >= needed[kind.gpu] else 10)

    kinds = [Kind(name, tp, "slo") for name in needed for tp in (1, 2)]
    by_count = cheapest(kinds, try_out, Criterion(0.9).broken, most_gpus=64)
    assert [(o.kind.gpu, o.gpus) for o in by_count[:2]] == [("B", 3), ("A", 7)]
    assert {o.why for o in by_count if o.kind.tp == 2} == {"does not fit"}
    assert next(o.why for o in by_count if o.kind.gpu == "C" and o.kind.tp == 1).startswith("not with 24 groups: ")
    by_price = cheapest(kinds, try_out, Criterion(0.9).broken, {"A": 1.0, "B": 4.0, "C": 1.0}, most_gpus=64)
    assert [(o.kind.gpu, o.price) for o in by_price[:2]] == [("A", 7.0), ("B", 12.0)]
    assert by_price[0].why.startswith("with 6: promises kept")


def test_two_groups_carry_about_twice_of_one() -> None:
    def of(groups: int) -> float:
        config = EngineConfig(model="m", groups=groups, policy="chunked", ttft_ms=500, tpot_ms=40)
        machine = by_hardware(config, known_shape("Llama-3.1-8B"), gpu("H100").hardware)

        def run_at(rate: float, seed: int) -> Simulation:
            times = poisson(rate, 10.0, seed)
            load = OpenLoop(requests(times, Fixed(2000), Fixed(16), seed=seed))
            return simulate(config, machine, load, may_miss=Criterion(0.9).may_miss(len(times)))

        return capacity(run_at, Criterion(0.9), range(1), 8.0 * groups).rate

    assert 1.6 < of(2) / of(1) < 2.8
