"""`alternate`: strictly one chunk of one prompt, then one token of one stream, two forwards an iteration.

The teaching version: who runs when can be read off a list, at the price of two small forwards where one would do.
Streams take turns in the order in which they joined; a new one joins behind the youngest.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from scheduler.budget import NOTHING_WANTED, Batch, TokenBudget
from scheduler.policies.base import Mix, YoungestVictim, fill_with_chunks
from scheduler.request import Sequence


class AlternatePolicy(YoungestVictim):
    name: ClassVar[str] = "alternate"

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._last_order = -1

    def compose(self, batch: Batch) -> list[Mix]:
        forwards: list[Mix] = []
        self.decision = self._budget.decide(batch) if batch.prefills else NOTHING_WANTED
        if batch.prefills:
            forwards.append(Mix(chunks=fill_with_chunks(batch.prefills[:1], self.decision.token_budget)))
        if batch.decodes:
            forwards.append(Mix([self._next_in_turn(batch.decodes)]))
        return [forward for forward in forwards if not forward.empty]

    def _next_in_turn(self, decodes: Seq[Sequence]) -> Sequence:
        """The stream that joined next after the one served last; after the youngest comes the oldest."""
        later = [sequence for sequence in decodes if sequence.order > self._last_order]
        turn = min(later or decodes, key=lambda sequence: sequence.order)
        self._last_order = turn.order
        return turn
