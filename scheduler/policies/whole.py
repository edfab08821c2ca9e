"""`whole`: continuous batching that takes a prompt whole, in an iteration of its own. Every stream waits for it.

This is the problem that chunking solves, kept runnable so that it can be measured. Prompts that wait together share an
iteration up to `max_batched_tokens`; a longer one still goes whole. Between two such iterations the streams get one, so
that arrivals without end cannot silence them for ever.
"""

from __future__ import annotations

from typing import ClassVar

from scheduler.budget import NOTHING_WANTED, Batch, Decision
from scheduler.policies.base import Draft, Mix, YoungestVictim


class WholePolicy(YoungestVictim):
    name: ClassVar[str] = "whole"

    def __init__(self, max_batched_tokens: int) -> None:
        if max_batched_tokens < 1:
            raise ValueError(f"max_batched_tokens must be at least 1, got {max_batched_tokens}")
        self._max_batched_tokens = max_batched_tokens
        self._streams_are_owed = False

    def compose(self, batch: Batch) -> list[Mix]:
        if batch.prefills and not (self._streams_are_owed and batch.decodes):
            self._streams_are_owed = True
            prompts = self._whole_prompts(batch)
            self.decision = Decision(sum(draft.count for draft in prompts), "whole")
            return [Mix(chunks=prompts)]
        self._streams_are_owed = False
        self.decision = NOTHING_WANTED
        return [Mix(batch.decodes)] if batch.decodes else []

    def _whole_prompts(self, batch: Batch) -> list[Draft]:
        prompts: list[Draft] = []
        tokens = 0
        for sequence in batch.prefills:
            tokens += sequence.prefill_remaining
            if prompts and tokens > self._max_batched_tokens:
                break
            prompts.append(Draft(sequence, sequence.prefill_remaining))
        return prompts
