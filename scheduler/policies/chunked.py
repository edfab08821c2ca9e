"""`chunked`: every iteration is one fused forward of all decodes and up to a budget of prompt tokens, decodes first.

The way of Sarathi-Serve (Agrawal et al., OSDI 2024). The budget is injected: a constant here.
"""

from __future__ import annotations

from typing import ClassVar

from scheduler.budget import NOTHING_WANTED, Batch, TokenBudget
from scheduler.policies.base import Mix, YoungestVictim, fill_with_chunks


class ChunkedPolicy(YoungestVictim):
    name: ClassVar[str] = "chunked"

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget

    def compose(self, batch: Batch) -> list[Mix]:
        self.decision = self._budget.decide(batch) if batch.prefills else NOTHING_WANTED
        fused = Mix(batch.decodes, fill_with_chunks(batch.prefills, self.decision.token_budget))
        return [] if fused.empty else [fused]
