"""What a policy decides: which running sequences take how many tokens, in which forwards of the next iteration."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from scheduler.budget import NOTHING_WANTED, Batch, Decision
from scheduler.entrance import Urgency
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.streams import Streams


@dataclass(frozen=True, slots=True)
class Draft:
    """`count` tokens of one prompt. What the policy wants, before blocks are allocated for it."""

    sequence: Sequence
    count: int


class Mix(NamedTuple):
    """What shares a forward: one token of each of the `decodes`, then the chunks of prompts. `known` is what it costs
    by, where a policy has worked that out already."""

    decodes: Seq[Sequence] = ()
    chunks: Seq[Draft] = ()
    known: Features | None = None

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def features(self) -> Features:
        """What it costs by, before it is booked as computed."""
        if self.known is not None:
            return self.known
        streams, decodes = self.decodes, len(self.decodes)
        read = streams.context if isinstance(streams, Streams) else sum([sequence.computed for sequence in streams])
        features = Features(0, decodes, read + decodes)
        for draft in self.chunks:
            features = features.with_chunk(draft.sequence.computed, draft.count)
        return features


class Policy(Protocol):
    """One way to share an iteration between prompts and decodes. Blocks, slots and the wire are not its concern."""

    name: ClassVar[str]
    decision: Decision
    """Of the last `compose`."""

    @property
    def urgency(self) -> Urgency | None:
        """By what those that wait are let in by their deadlines; None: as they came."""

    def compose(self, batch: Batch) -> list[Mix]:
        """The forwards of the next iteration, in order, none of them empty; none where there is nothing to run."""

    def victim(self, candidates: Seq[Sequence], now: float) -> Sequence:
        """Which of the running sequences that can, oldest first, gives its blocks up when there are none left."""


class YoungestVictim:
    """Preempt whoever came last: the oldest always gets on, so that everybody ends."""

    decision: Decision = NOTHING_WANTED
    urgency: Urgency | None = None

    def victim(self, candidates: Seq[Sequence], now: float) -> Sequence:
        return candidates[-1]


def fill_with_chunks(prefills: Iterable[Sequence], token_budget: int) -> list[Draft]:
    """Chunks of the prompts in the order given, until the budget is spent."""
    chunks: list[Draft] = []
    for sequence in prefills:
        if token_budget <= 0:
            break
        chunk_size = min(token_budget, sequence.prefill_remaining)
        chunks.append(Draft(sequence, chunk_size))
        token_budget -= chunk_size
    return chunks
