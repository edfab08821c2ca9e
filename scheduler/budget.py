"""The token budget: how many prompt tokens one iteration may carry. An injected object, so that changing it means
writing one class and never copying the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """What a policy and a budget see: the running sequences, oldest first, and the time (seconds, injected clock)."""

    prefills: Seq[Sequence]
    decodes: Seq[Sequence]
    now: float


class TokenBudget(Protocol):
    """Prompt tokens for one iteration that also carries every decode of the batch. Never negative."""

    def prefill_tokens(self, batch: Batch) -> int: ...


@dataclass(frozen=True, slots=True)
class StaticBudget:
    """The same chunk in every iteration, chosen by the operator. Raises ValueError for less than one token."""

    chunk_size: int

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")

    def prefill_tokens(self, batch: Batch) -> int:
        return self.chunk_size
