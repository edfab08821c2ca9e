"""Bisection: the boundary is found wherever it is, and whatever was guessed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.search import largest, smallest

numbers = st.integers(0, 200)


@given(numbers, numbers, numbers, st.none() | st.integers(-10, 300))
def test_the_largest_that_holds(low: int, span: int, boundary: int, guess: int | None) -> None:
    asked = []

    def holds(n: int) -> bool:
        asked.append(n)
        return n <= boundary

    high = low + span
    assert largest(holds, high, low, guess) == min(high, max(low, boundary))
    assert all(low < n <= high for n in asked), "the lower end is taken to hold"


def test_a_good_guess_costs_few_questions() -> None:
    asked = []

    def holds(n: int) -> bool:
        asked.append(n)
        return n <= 4321

    assert largest(holds, 1 << 20, guess=4321) == 4321
    assert len(asked) == 2


@given(numbers, numbers, numbers)
def test_the_smallest_that_holds(low: int, span: int, boundary: int) -> None:
    high = low + span
    assert smallest(lambda n: n >= boundary, low, high) == min(high, max(low, boundary))
