"""What goes for all streams of a group at once, since each step of theirs is one token more for each of them."""

from __future__ import annotations

import math
from bisect import bisect_right


class Lockstep:
    """Steps are counted from 1. `planned` have been, and the tokens of those up to `came` are there, the last ones
    since `last_at` (seconds).

    Who is in step reads here how far it is (`scheduler.request.Sequence`), so that a step does not touch those that it
    takes further: it costs as much for a hundred streams as for one.
    """

    __slots__ = ("_longest", "came", "last_at", "planned")

    def __init__(self) -> None:
        self.planned = 0
        self.came = 0
        self.last_at = 0.0
        self._longest: list[tuple[int, float]] = []
        """Steps whose gap was longer than that of any step since: fewer and fewer, the longer ago."""

    def tokens_came(self, step: int, now: float) -> None:
        gap_s, longest = now - self.last_at, self._longest
        while longest and longest[-1][1] <= gap_s:
            longest.pop()
        longest.append((step, gap_s))
        self.came, self.last_at = step, now

    def longest_gap_s(self, after: int) -> float:
        """Of the steps after that one; 0 where none of them came."""
        place = bisect_right(self._longest, (after, math.inf))
        return self._longest[place][1] if place < len(self._longest) else 0.0

    def forget_gaps(self) -> None:
        """Nobody is in step."""
        self._longest.clear()
