"""Those that wait by when they are due, and which of them yield since not all can be in time.

Which prompts are given up is Moore's rule (Management Science 1968) for the fewest late jobs on one machine, asked anew
as things go: in the order of their deadlines, whenever one would be late, the longest of those so far yields. So most
are in time, and what is given up is what costs the others most. Relegation of the hopeless as such is Niyama's (ASPLOS
2026).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

from scheduler.request import Sequence

MOST_REVIEWED = 128
"""Prompts that are looked at in a review, the first to be due: of those after them it is not yet known."""

Due = tuple[float, int, Sequence]
Work = Callable[[Sequence], float]
"""Seconds that the rest of a prompt takes, beside all that is not a prompt."""


def of(sequence: Sequence) -> Due:
    return sequence.due, sequence.order, sequence


def givable(sequence: Sequence) -> bool:
    """Whether it may be given up: it has no token yet, neither here nor in an earlier life."""
    return sequence.first_token_at is None and not sequence.request.produced


class Deadlines:
    """`timely` can be in time as far as is known, `yielding` go after them; both by when they are due."""

    __slots__ = ("passed_from", "timely", "yielding")

    def __init__(self) -> None:
        self.timely: list[Due] = []
        self.yielding: list[Due] = []
        self.passed_from = 0
        """What the line had let in when the oldest of these became the oldest."""

    def join(self, sequence: Sequence) -> None:
        sequence.due = sequence.wanted_at()
        insort(self.yielding if sequence.yields else self.timely, of(sequence))

    def leave(self, sequence: Sequence) -> None:
        listed = self.yielding if sequence.yields else self.timely
        del listed[bisect_left(listed, (sequence.due, sequence.order))]

    def review(self, running: Iterable[Sequence], work: Work, now: float) -> None:
        """Settle anew who yields, of these and of the prompts that hold a slot already."""
        possible = bisect_left(self.yielding, (now,))
        prompts = [
            *self.timely[:MOST_REVIEWED],
            *self.yielding[possible : possible + MOST_REVIEWED],
            *[of(sequence) for sequence in running],
        ]
        prompts.sort()
        late = relegated(prompts, work, now)
        for due in prompts:
            sequence = due[2]
            if (sequence.order in late) != sequence.yields:
                self._turn(due)

    def _turn(self, due: Due) -> None:
        sequence = due[2]
        before, after = (self.yielding, self.timely) if sequence.yields else (self.timely, self.yielding)
        sequence.yields = not sequence.yields
        place = bisect_left(before, due[:2])
        if place < len(before) and before[place][2] is sequence:
            del before[place]
            insort(after, due)


def relegated(prompts: Seq[Due], work: Work, now: float) -> set[int]:
    """Orders of those that are given up, of prompts that stand by when they are due.

    Whoever would be late gives way to those before, or one of those does that takes longer and was promised no less
    time: nobody loses a short promise for others that may take their time.
    """
    takes = [work(sequence) for _, _, sequence in prompts]
    ends, late = now, set[int]()
    for (due, _, _), seconds in zip(prompts, takes, strict=True):
        ends += seconds
        if ends > due:
            break
    else:  # as it nearly always is: nobody would be late
        return late
    ends = now
    kept: dict[int, list[tuple[float, int]]] = {}  # by scale, the longest first
    for (due, order, sequence), seconds in zip(prompts, takes, strict=True):
        scale = _scale(sequence)
        ends += seconds
        if givable(sequence):
            heappush(kept.setdefault(scale, []), (-seconds, order))
        while ends > due:
            heap = min((heap for of, heap in kept.items() if of >= scale and heap), default=None)
            if heap is None:
                break
            less, given_up = heappop(heap)
            late.add(given_up)
            ends += less
    return late


def _scale(sequence: Sequence) -> int:
    """Promises of about the same time have one."""
    return math.frexp(sequence.due - sequence.arrival)[1]
