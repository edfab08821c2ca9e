"""`--find-capacity` and `--find-cheapest`: what is searched, from the options to the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cluster.config import EngineConfig
from cluster.simulated.capacity import Capacity, Criterion, capacity
from cluster.simulated.cheapest import Kind, Offer, cheapest
from cluster.simulated.cluster import Noise, simulate
from cluster.simulated.machine import Machine, by_hardware
from cluster.simulated.seen import Simulation
from cluster.workloads import OpenLoop, Workload
from scheduler.hardware import gpu
from scheduler.policies import POLICIES
from scheduler.roofline import ModelShape

Say = Callable[[str], None]


def criterion_of(attainment: float | None, p99_tbt_ms: float | None, delay_ms: float | None) -> Criterion:
    """Without anything else, 90 % attainment; with a P99 TBT, Sarathi-Serve's form with a median delay of 2 s."""
    if p99_tbt_ms is None and delay_ms is None:
        return Criterion(0.9 if attainment is None else attainment)
    tbt = None if p99_tbt_ms is None else p99_tbt_ms / 1e3
    return Criterion(attainment, tbt, 2.0 if delay_ms is None else delay_ms / 1e3)


def find_capacity(
    config: EngineConfig,
    machine: Machine,
    load: Callable[[float, int], OpenLoop],
    criterion: Criterion,
    seeds: range,
    sigma: float,
    say: Say,
) -> Capacity:
    def run_at(rate: float, seed: int) -> Simulation:
        workload = load(rate, seed)
        run = simulate(config, machine, workload, Noise(sigma, seed), criterion.may_miss(len(workload.requests)))
        said = criterion.broken(run)
        say(f"seed {seed}, {rate:.3f} requests/s: {said or 'holds'}")
        return run

    return capacity(run_at, criterion, seeds, guess=float(config.group_count))


def find_cheapest(
    config: EngineConfig,
    shape: ModelShape,
    kinds: list[Kind],
    workload: Workload,
    criterion: Criterion,
    prices: dict[str, float] | None,
    most_gpus: int,
    noise: Noise,
    say: Say,
) -> list[Offer]:
    def try_out(kind: Kind, groups: int) -> Simulation:
        changed = config.model_copy(update={"tp": kind.tp, "groups": groups, "policy": kind.policy})
        machine = by_hardware(changed, shape, gpu(kind.gpu).hardware)
        return simulate(changed, machine, workload, noise, criterion.may_miss(len(workload.requests)))

    return cheapest(kinds, try_out, criterion.broken, prices, most_gpus, say)


def kinds_of(gpus: str, tps: str, policies: str) -> list[Kind]:
    """All combinations. Raises ValueError for a name or number that is none."""
    names = [gpu(name).hardware.name for name in _parts("--gpus", gpus)]
    wanted = _parts("--policies", policies)
    for policy in wanted:
        if policy not in POLICIES:
            raise ValueError(f"--policies: unknown policy {policy!r}; choose of {', '.join(POLICIES)}")
    degrees = []
    for part in _parts("--tps", tps):
        if not part.isdecimal() or not 1 <= int(part) <= 64:
            raise ValueError(f"--tps: {part!r} is no number of GPUs of a group")
        degrees.append(int(part))
    return [Kind(name, tp, policy) for name in names for tp in degrees for policy in wanted]


def _parts(option: str, text: str) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ValueError(f"{option} names nothing")
    return parts


def read_prices(path: Path, kinds: list[Kind]) -> dict[str, float]:
    """From a JSON file such as {"A100-80": 2.5, "H100": 4}: money an hour of each GPU, in whatever currency. Raises
    ValueError where it is none, or a GPU that is to be compared is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--prices: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"--prices: {path} is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"--prices: {path} is no object of prices by GPU")
    prices: dict[str, float] = {}
    for name, price in content.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e9:
            raise ValueError(f"--prices: the price of {name} is no number above 0: {price!r}")
        prices[gpu(name).hardware.name] = float(price)
    missing = sorted({kind.gpu for kind in kinds} - prices.keys())
    if missing:
        raise ValueError(f"--prices: {path} has no price of {', '.join(missing)}")
    return prices
