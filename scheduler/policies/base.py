"""What a policy decides: which running sequences take how many tokens, in which forwards of the next iteration."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

from scheduler.budget import NOTHING_WANTED, Batch, Decision
from scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """`count` tokens of one sequence. What the policy wants, before blocks are allocated for it."""

    sequence: Sequence
    count: int


Forward = list[Draft]


class Policy(Protocol):
    """One way to share an iteration between prompts and decodes. Blocks, slots and the wire are not its concern."""

    name: ClassVar[str]
    decision: Decision
    """Of the last `compose`."""

    def compose(self, batch: Batch) -> list[Forward]:
        """The forwards of the next iteration, in order; empty where there is nothing to run."""

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        """Which of the running sequences gives its blocks up when there are none left."""


class YoungestVictim:
    """Preempt whoever came last: the oldest always gets on, so that everybody ends."""

    decision: Decision = NOTHING_WANTED

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        return max(candidates, key=lambda sequence: sequence.order)


def decode_all(decodes: Iterable[Sequence]) -> Forward:
    return [Draft(sequence, 1) for sequence in decodes]


def fill_with_chunks(prefills: Iterable[Sequence], token_budget: int) -> Forward:
    """Chunks of the prompts in the order given, until the budget is spent."""
    chunks: Forward = []
    for sequence in prefills:
        if token_budget <= 0:
            break
        chunk_size = min(token_budget, sequence.prefill_remaining)
        chunks.append(Draft(sequence, chunk_size))
        token_budget -= chunk_size
    return chunks
