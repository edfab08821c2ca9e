"""Totals of a simulation that keeps no requests: the same run, and as much of it as was asked for."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Iterator
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import EngineConfig
from cluster.simulated.cluster import simulate, simulate_stream
from cluster.simulated.machine import by_hardware
from cluster.simulated.seen import quantile_of
from cluster.simulated.totals import Histogram
from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt, parse_lengths, poisson, requests
from scheduler.hardware import gpu
from scheduler.shapes import known_shape


@given(st.lists(st.floats(1e-5, 1e4), min_size=1), st.floats(0, 1))
def test_a_quantile_is_off_by_less_than_a_class(values: list[float], quantile: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.note(value)
    assert histogram.quantile(quantile) == pytest.approx(quantile_of(values, quantile), rel=0.01)


def test_what_never_came_is_later_than_anything() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0
    for value in (1.0, math.inf, 0.0):
        histogram.note(value)
    assert histogram.quantile(1) == math.inf
    assert histogram.quantile(0.5) == pytest.approx(1.0)


def test_a_stream_is_the_same_run_without_its_requests() -> None:
    config = EngineConfig(model="any", groups=2, ttft_ms=500, tpot_ms=30, max_queued_requests=4, max_running=8)
    machine = by_hardware(config, known_shape("Llama-3.1-8B"), gpu("A100").hardware)
    load = requests(poisson(25.0, 10.0), parse_lengths("256:2048"), parse_lengths("1:64"))
    kept = simulate(config, machine, OpenLoop(load))
    totals, run = simulate_stream(config, machine, iter(load))

    assert any(seen.refused for seen in kept.requests), "some are to be refused"
    assert 0 < kept.attainment < 1
    assert (run.iterations, run.ended, run.requests) == (kept.iterations, kept.ended, [])
    assert (totals.requests, totals.attainment) == (len(load), kept.attainment)
    assert totals.tokens == sum(len(seen.tokens) for seen in kept.requests)
    assert totals.gaps.quantile(0.99) == pytest.approx(kept.gap_quantile(0.99), rel=0.01)
    assert totals.delays.quantile(0.5) == pytest.approx(kept.delay_quantile(0.5), rel=0.01, abs=1e-5)


def test_memory_is_that_of_what_is_under_way() -> None:
    """As much after three times as many requests, once the pool knows as many blocks as it has. What a request left
    behind would be seen if it were its id alone."""
    config = EngineConfig(model="any", groups=2, ttft_ms=2000, tpot_ms=50, num_blocks=30, block_size=64)
    machine = by_hardware(config, known_shape("Llama-3.1-8B"), gpu("A100").hardware)
    count, held = 500, dict[int, int]()

    def made() -> Iterator[PlannedRequest]:
        source = Random("memory")
        for number in range(3 * count):
            if number % count > count - 6:
                gc.collect()  # empties what the interpreter keeps for objects to come, too
                held[number] = tracemalloc.get_traced_memory()[0]
            lengths = source.choice((96, 160)), source.choice((8, 16))
            yield PlannedRequest(RandomPrompt(lengths[0], str(number)), lengths[1], number / 20)

    gc.freeze()
    tracemalloc.start()
    try:
        totals, run = simulate_stream(config, machine, made())
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert (totals.finished, run.requests) == (3 * count, [])
    once, thrice = (fmean(held[number] for number in held if number // count == part) for part in (0, 2))
    assert thrice - once < 25 * 2 * count
