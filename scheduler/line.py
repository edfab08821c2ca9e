"""Sequences in the order in which they came, or in which tenants take turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from scheduler.request import Sequence


class Line(list[Sequence]):
    """Oldest first. `join` and `leave` find the place by bisection: when a thousand requests end at once, none of them
    is looked for from the start."""

    key: Callable[[Sequence], Any] = staticmethod(attrgetter("order"))

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        """How often somebody joined or left."""
        self.tokens = 0
        """Of all in the line, as many as each had when it joined."""
        self._joined_with: dict[int, int] = {}

    def join(self, sequence: Sequence) -> None:
        """Take its place in the line, which is the last one but for those that come back after a preemption."""
        self.changes += 1
        self._joined_with[sequence.order] = len(sequence.tokens)
        self.tokens += len(sequence.tokens)
        if not self or self.key(self[-1]) < self.key(sequence):
            self.append(sequence)
        else:
            insort(self, sequence, key=self.key)

    def leave(self, sequence: Sequence) -> None:
        """Raises ValueError for one that is not in the line."""
        place = bisect_left(self, self.key(sequence), key=self.key)
        if place == len(self) or self[place] is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not in this line")
        del self[place]
        self.changes += 1
        self.tokens -= self._joined_with.pop(sequence.order)


class FairLine(Line):
    """Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) over tenants, with tokens as the length of a request.

    A sequence's turn is where its tenant's one before ends, or the turn of the last that left from the front, whichever
    is later; it ends its tokens (prompt and `max_tokens`), divided by its weight, after that. The earliest turn is
    first. So a tenant that floods waits for itself, and one that comes back after a pause has saved nothing up. For a
    single tenant it is the order of arrival. Whoever comes back after a preemption has the turn that it had.
    """

    key = staticmethod(attrgetter("turn", "order"))

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def join(self, sequence: Sequence) -> None:
        if sequence.turn is None:
            request = sequence.request
            sequence.turn = max(self._now, self._ends.get(request.tenant, 0.0))
            self._ends[request.tenant] = sequence.turn + sequence.final_length / request.weight
        super().join(sequence)

    def leave(self, sequence: Sequence) -> None:
        if self and self[0] is sequence and sequence.turn is not None:
            self._now = max(self._now, sequence.turn)
        super().leave(sequence)
        if not self:
            self._now = max((self._now, *self._ends.values()))
            self._ends.clear()
