"""Prefill and decode apart on simulated GPUs: the real schedulers and state machine, transfers on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.simulated.cluster import Noise, SimulatedCluster, simulate
from cluster.simulated.machine import Link, Machine, by_hardware
from cluster.simulated.seen import Simulation
from cluster.simulated.virtual_time import VirtualLoop, run_virtual
from cluster.workloads import Fixed, OpenLoop, Uniform, Workload, interference, poisson, requests
from scheduler.hardware import gpu
from scheduler.shapes import known_shape

SHAPE = known_shape("Llama-3.1-8B")


def config_of(**changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"mode": "separated", "policy": "chunked", "prefill_groups": 2, "decode_groups": 2}
    return EngineConfig(model=SHAPE.name, **{**settings, **changes})


def machine_of(config: EngineConfig) -> Machine:
    return by_hardware(config, SHAPE, gpu("A100-80").hardware)


def load(rate: float = 6, lasts: float = 8, outputs: int = 40) -> OpenLoop:
    return OpenLoop(requests(poisson(rate, lasts, 1), Uniform(100, 3000), Uniform(2, outputs), seed=1))


def run(workload: Workload, **changes: Any) -> Simulation:
    config = config_of(**changes)
    return simulate(config, machine_of(config), workload, keep_steps=True)


def all_served(found: Simulation) -> bool:
    return all(
        request.refused is None and request.lost is None and len(request.tokens) == request.planned.output_tokens
        for request in found.requests
    )


def test_prompts_on_one_side_and_decodes_on_the_other() -> None:
    found = run(load())
    assert all_served(found)
    assert found.gpus == 4
    assert {step.group for step in found.steps} == {0, 1, 2, 3}
    assert all(step.decodes == 0 for step in found.steps if step.group < 2)
    assert all(step.prefill_tokens == 0 for step in found.steps if step.group >= 2)
    assert {(move.source < 2, move.target >= 2) for move in found.moved} == {(True, True)}
    assert len(found.moved) == len(found.requests)
    for move in found.moved:
        assert move.blocks_sent + move.blocks_shared == -(-move.tokens // 256)
        assert move.bytes == move.blocks_sent * 256 * SHAPE.kv_bytes_per_token
        assert move.wait_s >= 0


def test_a_long_prompt_s_kv_goes_chunk_by_chunk_and_no_stream_waits_for_it() -> None:
    found = run(interference(4, 8192), prefill_groups=1, decode_groups=1)
    long = found.requests[-1]
    (move,) = (moved for moved in found.moved if moved.request_id == str(len(found.requests) - 1))
    assert move.early_bytes > 0.8 * move.bytes, "most of it went while the prompt was computed"
    assert long.tokens[0] - long.arrival > 0.5
    plain = max(step.ended - step.started for step in found.steps if step.group == 1)
    after_arrival = [stream.gaps[1:] for stream in found.requests[:4]]
    assert max(gap for gaps in after_arrival for gap in gaps) <= 2 * plain


def test_a_slow_link_is_paid_at_the_second_token() -> None:
    config = config_of(prefill_groups=1, decode_groups=1)
    quick = machine_of(config)
    assert quick.link is not None
    slow = replace(quick, link=Link(quick.link.block_bytes, quick.link.bandwidth / 1000, 0.0))
    workload = OpenLoop(requests([0.0], Fixed(4000), Fixed(5)))
    (fast,), (late,) = (simulate(config, machine, workload).requests for machine in (quick, slow))
    assert fast.tokens[0] == late.tokens[0]
    assert late.tokens[1] - late.tokens[0] > 10 * (fast.tokens[1] - fast.tokens[0])
    assert late.gaps[1:] == pytest.approx(fast.gaps[1:])


def test_without_room_on_the_decode_side_prompts_wait_and_all_are_served() -> None:
    found = run(load(rate=30, lasts=4, outputs=200), prefill_groups=1, decode_groups=1, num_blocks=30)
    assert all_served(found)
    assert max(move.wait_s for move in found.moved) > 0.05, "somebody had to wait for room"


def test_both_sides_are_empty_in_the_end() -> None:
    config = config_of(num_blocks=40)

    async def served(loop: VirtualLoop) -> SimulatedCluster:
        cluster = SimulatedCluster(config, machine_of(config), Noise(0.2, 3), loop)
        await cluster.serve(load(rate=20, lasts=3))
        return cluster

    for loop in run_virtual(served).loops:
        stats = loop.scheduler.stats()
        assert loop.scheduler.audit() is None
        assert (stats["running"], stats["waiting"], loop.scheduler.exchange.leased) == (0, 0, 0)
        assert stats["blocks_free"] == stats["blocks_total"] == 40


def test_what_the_decode_side_has_cached_is_not_sent_again() -> None:
    shared = requests([0.0, 5.0], Fixed(300), Fixed(4), shared_prefix=2048)
    found = run(OpenLoop(shared), prefill_groups=1, decode_groups=1)
    first, second = sorted(found.moved, key=lambda move: move.request_id)
    assert (first.blocks_shared, second.blocks_shared) == (0, 8)
    assert second.bytes < first.bytes / 2


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run(load()), run(load())
    assert [list(request.tokens) for request in first.requests] == [list(request.tokens) for request in second.requests]
    assert first.moved == second.moved


def test_what_is_not_simulated_is_said() -> None:
    config = config_of(decode_tp=2)
    with pytest.raises(ValueError, match="one tensor-parallel degree"):
        simulate(config, machine_of(config), load())
    config = config_of()
    with pytest.raises(ValueError, match="between two groups"):
        simulate(config, replace(machine_of(config), link=None), load())
