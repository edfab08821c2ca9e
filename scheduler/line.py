"""Sequences in the order in which they came."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler.request import Sequence

_ORDER = attrgetter("order")


class Line(list[Sequence]):
    """Oldest first. `join` and `leave` find the place by bisection: when a thousand requests end at once, none of them
    is looked for from the start."""

    def join(self, sequence: Sequence) -> None:
        """Take its place in the line, which is the last one but for those that come back after a preemption."""
        if not self or self[-1].order < sequence.order:
            self.append(sequence)
        else:
            insort(self, sequence, key=_ORDER)

    def leave(self, sequence: Sequence) -> None:
        """Raises ValueError for one that is not in the line."""
        place = bisect_left(self, sequence.order, key=_ORDER)
        if place == len(self) or self[place] is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not in this line")
        del self[place]
