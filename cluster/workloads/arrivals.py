"""When requests are due: seconds from the start, ascending, all before `duration_s`. The same seed, the same times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from random import Random

MOST = 1_000_000
"""Requests of one run. A rate beyond any server would otherwise fill the memory."""


def poisson(rate: float, duration_s: float, seed: int = 0) -> list[float]:
    """`rate` requests a second on average, each independent of the others."""
    return gamma(rate, 1.0, duration_s, seed)


def gamma(rate: float, burstiness: float, duration_s: float, seed: int = 0) -> list[float]:
    """Gaps of a gamma distribution with mean 1 / rate and shape `burstiness`: 1 is Poisson, below 1 come bursts with
    pauses between them (a coefficient of variation of 1 / sqrt(burstiness)), and far above 1 a steady beat."""
    return list(each_gamma(rate, burstiness, duration_s, seed))


def each_gamma(rate: float, burstiness: float, duration_s: float, seed: int = 0) -> Iterator[float]:
    """The same times, each worked out when it is asked for. What is wrong is said at once."""
    _check(duration_s, rate=rate, burstiness=burstiness)
    source = Random(f"{seed}/arrivals")
    scale = 1 / (rate * burstiness)
    return _until(duration_s, rate * duration_s, lambda now: now + source.gammavariate(burstiness, scale))


def ramp(first_rate: float, last_rate: float, duration_s: float, seed: int = 0) -> list[float]:
    """Poisson arrivals whose rate goes from the first to the last in a straight line."""
    return list(each_ramp(first_rate, last_rate, duration_s, seed))


def each_ramp(first_rate: float, last_rate: float, duration_s: float, seed: int = 0) -> Iterator[float]:
    """The same times, each worked out when it is asked for. What is wrong is said at once."""
    _check(duration_s, rate=max(first_rate, last_rate))
    if min(first_rate, last_rate) < 0:
        raise ValueError("a rate must not be below 0")
    source = Random(f"{seed}/arrivals")
    slope = (last_rate - first_rate) / duration_s
    expected = 0.0

    def following(_: float) -> float:
        """The time by which so many are expected: arrivals of rate 1, drawn on the axis of expected requests."""
        nonlocal expected
        expected += source.expovariate(1.0)
        return _when(expected, first_rate, slope)

    return _until(duration_s, (first_rate + last_rate) / 2 * duration_s, following)


def _when(expected: float, first_rate: float, slope: float) -> float:
    """The t at which first_rate * t + slope / 2 * t^2 = expected, or infinity if it never is."""
    inside = first_rate * first_rate + 2 * slope * expected
    if inside < 0:
        return math.inf
    denominator = first_rate + math.sqrt(inside)
    return 2 * expected / denominator if denominator > 0 else math.inf


def _until(duration_s: float, expected: float, following: Callable[[float], float]) -> Iterator[float]:
    if expected > MOST:
        raise ValueError(f"that is about {expected:,.0f} requests; a run has at most {MOST:,}")
    return islice(takewhile(lambda at_s: at_s < duration_s, _each(following)), 2 * MOST)


def _each(following: Callable[[float], float]) -> Iterator[float]:
    now = 0.0
    while True:
        now = following(now)
        yield now


def _check(duration_s: float, **positive: float) -> None:
    for name, value in {"duration": duration_s, **positive}.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {name} must be above 0, got {value}")
