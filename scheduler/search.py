"""Bisection over integers, for properties that hold on one side of a boundary."""

from __future__ import annotations

from collections.abc import Callable


def largest(holds: Callable[[int], bool], high: int, low: int = 0) -> int:
    """The largest n in low .. high that holds, of a property that once lost stays lost. `low` is taken to hold.

    `high` is tried first: what is searched for here often is all that there is.
    """
    if low < high and holds(high):
        return high
    high = max(low, high - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest n in low .. high that holds, of a property that once gained stays. `high` is taken to hold."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
