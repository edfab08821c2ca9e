"""Which rate is held: an engine of a publication's kind, and the search for its capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.publications.loads import Load
from benchmarks.publications.options import Row
from cluster.config import EngineConfig
from cluster.simulated.capacity import Capacity, Criterion, capacity
from cluster.simulated.cluster import EXACT, SimulatedCluster
from cluster.simulated.machine import Machine, by_hardware
from cluster.simulated.seen import Simulation
from cluster.simulated.virtual_time import run_virtual
from cluster.workloads import OpenLoop
from scheduler.costmodel import CostModel
from scheduler.hardware import gpu
from scheduler.policies import Policy
from scheduler.roofline import ModelShape
from scheduler.shapes import known_shape

A100 = gpu("A100-80").hardware
RUNNING = 128


def engine(model: str, policy: str, **more: Any) -> EngineConfig:
    return EngineConfig(**{"model": model, "policy": policy, "max_running": RUNNING, **more})


def machine_of(config: EngineConfig, shape: ModelShape | None = None, cost: CostModel | None = None) -> Machine:
    machine = by_hardware(config, shape or known_shape(config.model), A100)
    return machine if cost is None else replace(machine, cost=cost)


Own = Callable[[EngineConfig], Policy]
"""Makes a policy that only a publication has, for each group."""


def served(
    config: EngineConfig, machine: Machine, load: OpenLoop, may_miss: int | None = None, own: Own | None = None
) -> Simulation:
    """A load on simulated groups, under the configuration's policy or one of the publication's own."""

    async def serve(cluster: SimulatedCluster) -> Simulation:
        if own is not None:
            for loop in cluster.loops:
                loop.scheduler.policy = own(config)
        return await cluster.serve(load)

    return run_virtual(lambda loop: serve(SimulatedCluster(config, machine, EXACT, loop, may_miss)))


def capacity_of(
    config: EngineConfig, machine: Machine, load: Load, criterion: Criterion, seeds: int, own: Own | None = None
) -> Capacity:
    def run_at(rate: float, seed: int) -> Simulation:
        workload = load(rate, seed)
        return served(config, machine, workload, criterion.may_miss(len(workload.requests)), own)

    return capacity(run_at, criterion, range(seeds))


def told(found: Capacity) -> Row:
    """Requests a second, with half of the 95 % interval over seeds, and what broke at the next higher rate."""
    margin = None if found.margin is None else round(found.margin, 3)
    return {"rate": round(found.rate, 3), "margin": margin, "broke": found.seeds[0].broken}


def with_ratios(rows: list[Row], base: str) -> list[Row]:
    """Beside each rate, how many times that of the row of `base` it is."""
    of_base = next(row["rate"] for row in rows if row["policy"] == base)
    return [{**row, f"over {base}": round(row["rate"] / of_base, 2) if of_base else None} for row in rows]


def ways(chunks: tuple[int, ...]) -> list[tuple[str, str, int]]:
    """Name, policy and chunk size of what is compared."""
    return [("whole", "whole", 512), *((f"chunked {chunk}", "chunked", chunk) for chunk in chunks), ("slo", "slo", 512)]
