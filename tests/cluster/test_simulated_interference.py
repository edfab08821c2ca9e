"""Interference on simulated GPUs: the load test's own protocol, on a virtual clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.config import EngineConfig
from cluster.simulated.cluster import simulate
from cluster.simulated.machine import by_hardware
from cluster.simulated.seen import Simulation
from cluster.workloads import Fixed, Interference, interference
from scheduler.hardware import gpu
from scheduler.shapes import known_shape


def run(workload: Interference, policy: str, groups: int = 1) -> Simulation:
    config = EngineConfig(model="Llama-3.1-8B", policy=policy, groups=groups, chunk_size=256)
    machine = by_hardware(config, known_shape("Llama-3.1-8B"), gpu("A100-80").hardware)
    return simulate(config, machine, workload, keep_steps=True)


@pytest.mark.parametrize("policy", ["alternate", "whole", "chunked", "slo"])
def test_streams_outlast_the_long_prompt_by_their_tail(policy: str) -> None:
    found = run(interference(3, 4096, lead=7, tail=5), policy)
    *streams, long = found.requests
    assert long.tokens
    for stream in streams:
        assert stream.left
        assert stream.lost is None
        assert sum(token <= long.arrival for token in stream.tokens) >= 7
        assert long.ended is not None
        after = sum(token > long.ended for token in stream.tokens)
        assert 5 <= after <= 6, "one may be under way when its reader leaves"
    assert found.ended == max(request.ended or 0 for request in found.requests)


def test_every_iteration_is_kept_with_its_group() -> None:
    found = run(interference(4, 1024, lead=3, tail=3), "chunked", groups=2)
    assert {step.group for step in found.steps} == {0, 1}
    assert len(found.steps) == found.iterations.count
    assert sum(step.prefill_tokens for step in found.steps) == 4 * 16 + 1024
    for group in (0, 1):
        steps = [step for step in found.steps if step.group == group]
        assert all(earlier.ended <= later.started for earlier, later in pairwise(steps))


def test_a_stream_that_ends_early_holds_nobody_up() -> None:
    short = interference(2, 512, output_lengths=Fixed(4), lead=9, tail=9)
    found = run(short, "whole")
    assert [len(request.tokens) for request in found.requests] == [4, 4, 12]
    assert not any(request.left for request in found.requests)


def test_a_long_prompt_that_is_refused_ends_the_run() -> None:
    config = EngineConfig(model="Llama-3.1-8B", policy="whole", num_blocks=4)
    machine = by_hardware(config, known_shape("Llama-3.1-8B"), gpu("A100-80").hardware)
    found = simulate(config, machine, interference(1, 5000, lead=2, tail=2))
    stream, long = found.requests
    assert long.refused is not None
    assert stream.left
