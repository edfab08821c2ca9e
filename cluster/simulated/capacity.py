"""The highest rate of requests at which a promise holds, found by bisection over simulations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.simulated.seen import Simulation

TOLERANCE = 0.025
"""The bisection ends when the highest rate that holds and the lowest that does not are this close, relative."""
FEWEST = 50
"""Requests of a run: fewer say nothing of a share or a percentile."""
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Criterion:
    """When a rate is carried: a share of `attainment` of the requests has every promise kept; or, in Sarathi-Serve's
    form (OSDI 2024), the 99th percentile of the time between tokens is at most `tbt_s` and the median scheduling delay
    at most `delay_s`."""

    attainment: float | None = None
    tbt_s: float | None = None
    delay_s: float | None = None

    def __post_init__(self) -> None:
        if self.attainment is None and self.tbt_s is None and self.delay_s is None:
            raise ValueError("a capacity needs something that is to hold")
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise ValueError(f"an attainment is above 0 and at most 1, got {self.attainment:g}")
        if self.tbt_s is not None and not self.tbt_s > 0:
            raise ValueError(f"a bound on the time between tokens is above 0, got {self.tbt_s * 1e3:g} ms")
        if self.delay_s is not None and not self.delay_s >= 0:
            raise ValueError(f"a bound on the scheduling delay is at least 0, got {self.delay_s * 1e3:g} ms")

    def may_miss(self, requests: int) -> int | None:
        """How many requests may miss their promise; None where that is not what counts."""
        return None if self.attainment is None else math.floor((1 - self.attainment) * requests + 1e-9)

    def broken(self, run: Simulation) -> str:
        """What does not hold, in words; empty where everything does."""
        if self.attainment is not None and (run.gave_up or run.attainment < self.attainment):
            return f"promises kept to less than {self.attainment:.0%} of requests ({run.missed_what()})"
        if self.tbt_s is not None and (p99 := run.gap_quantile(0.99)) > self.tbt_s:
            return f"P99 time between tokens {p99 * 1e3:.0f} ms, above {self.tbt_s * 1e3:.0f} ms"
        if self.delay_s is not None and (delay := run.delay_quantile(0.5)) > self.delay_s:
            return f"median scheduling delay {delay:.2f} s, above {self.delay_s:g} s"
        return ""


RunAt = Callable[[float, int], Simulation]
"""A run at a rate (requests a second) with a seed."""


@dataclass(frozen=True, slots=True)
class SeedCapacity:
    """Of one seed: the highest rate that was seen to hold (0: none was), the lowest seen not to, and what broke there.
    `runs` is how many simulations that took."""

    seed: int
    rate: float
    above: float
    broken: str
    runs: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second over several seeds of arrivals and lengths."""

    seeds: tuple[SeedCapacity, ...]

    @property
    def rates(self) -> list[float]:
        return [found.rate for found in self.seeds]

    @property
    def rate(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def margin(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean over seeds (Student's t), and no less than half of
        what the bisection leaves open; None for one seed."""
        if len(self.seeds) < 2:
            return None
        interval = _student(len(self.seeds) - 1) * statistics.stdev(self.rates) / math.sqrt(len(self.seeds))
        return max(interval, TOLERANCE / 2 * self.rate)


def capacity(run_at: RunAt, criterion: Criterion, seeds: Sequence[int], guess: float = 1.0) -> Capacity:
    """Search each seed by itself, from `guess` on or from what the seed before it had."""
    found: list[SeedCapacity] = []
    for seed in seeds:
        known = bool(found) and found[-1].rate > 0
        start, step = (found[-1].rate, 1.2) if known else (guess, 2.0)
        found.append(_of_seed(run_at, criterion, seed, start, step))
    return Capacity(tuple(found))


def _of_seed(run_at: RunAt, criterion: Criterion, seed: int, guess: float, step: float) -> SeedCapacity:
    low, high, broken, runs = 0.0, math.inf, "", 0

    def holds(rate: float) -> bool:
        nonlocal low, high, broken, runs
        runs += 1
        said = criterion.broken(run_at(rate, seed))
        if said:
            high, broken = rate, said
        else:
            low = rate
        return not said

    rate = guess
    for _ in range(MOST_STEPS):  # until there is one rate that holds and one that does not
        rate = rate * step if holds(rate) else rate / step
        if low > 0 and high < math.inf:
            break
    while low > 0 and high < math.inf and high - low > TOLERANCE * low:
        holds((low + high) / 2)
    return SeedCapacity(seed, low, high, broken, runs)


_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def _student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.7 / freedom
