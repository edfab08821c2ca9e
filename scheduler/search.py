"""Bisection over integers, for properties that hold on one side of a boundary."""

from __future__ import annotations

from collections.abc import Callable


def largest(holds: Callable[[int], bool], high: int, low: int = 0, guess: int | None = None) -> int:
    """The largest n in low .. high that holds, of a property that once lost stays lost. `low` is taken to hold.

    A `guess` is tried first, and around it the distance doubles: one that is right costs two questions. Without one, or
    where there is less than was guessed, it is `high`: what is searched for here often is all that there is.
    """
    if low < high and guess is not None and low < guess < high:
        low, high = _around(holds, guess, low, high)
    elif low >= high or holds(high):
        return max(low, high)
    else:
        high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _around(holds: Callable[[int], bool], guess: int, low: int, high: int) -> tuple[int, int]:
    """What is left of low .. high, by questions at a growing distance from the guess."""
    step = 1
    if holds(guess):
        low = guess
        while low < high and holds(further := min(low + step, high)):
            low, step = further, 2 * step
        return low, min(high, low + step - 1)
    high = guess - 1
    while high - step > low and not holds(high - step):
        high, step = high - step - 1, 2 * step
    return max(low, high - step), high


def smallest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest n in low .. high that holds, of a property that once gained stays. `high` is taken to hold."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
