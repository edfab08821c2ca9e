"""What the scheduler notes of plans under way and of tokens that came."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.budget import Decision
from scheduler.plan import NO_TOKEN, IterationResult
from scheduler.policies import Mix
from scheduler.prefixes import Written
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.scoring import Scored
from scheduler.slo import Outcome, Promise
from scheduler.streams import Step


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt in a plan: `count` of its `prompt_tokens` from `offset` on (after a preemption what was produced
    counts as prompt). `arrival` is its request's, by the loop's clock, `promise` what it was promised."""

    request_id: str
    offset: int
    count: int
    prompt_tokens: int
    arrival: float
    promise: Promise


class InFlight(NamedTuple):
    """A plan under way: who is sampled from, in the order of the plan, what each of its forwards costs by, why it is
    as large as it is, its chunks, whom it made give way, which sequences fill blocks in it, which chunks score
    their prompt, and the steps of all streams in it."""

    sampling: tuple[Sequence, ...]
    features: tuple[Features, ...]
    decision: Decision
    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...]
    written: list[Written]
    scored: list[Scored]
    steps: list[Step]

    def failed(self, result: IterationResult) -> list[Sequence]:
        """Those that could not be sampled from."""
        if NO_TOKEN not in result.tokens:
            return []
        sampled = zip(self.sampling, result.tokens, strict=True)
        return [sequence for sequence, token in sampled if token == NO_TOKEN]

    def computes(self) -> set[str]:
        """Whose tokens are in it."""
        return {sequence.request_id for sequence in self.sampling} | {chunk.request_id for chunk in self.chunks}


class TokenTiming(NamedTuple):
    """When a token came, in seconds since its request's arrival (of the first and the last one; of others None) and
    since the token before it (None: the first)."""

    request_id: str
    since_arrival_s: float | None
    gap_s: float | None
    last: bool


class Together(NamedTuple):
    """Tokens of sequences that had one before and are to have more, all of them after the same gap."""

    sequences: Seq[Sequence]
    gap_s: float


@dataclass(slots=True)
class Timings:
    """When tokens came. Nearly all those of an iteration are `together`: what is counted of them is counted at once.
    The `others` are first ones, last ones, and those that came after a gap of their own."""

    together: list[Together] = field(default_factory=list)
    others: list[TokenTiming] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.others) + sum([len(together.sequences) for together in self.together])

    def __iter__(self) -> Iterator[TokenTiming]:
        for sequences, gap_s in self.together:
            for sequence in sequences:
                yield TokenTiming(sequence.request_id, None, gap_s, False)
        yield from self.others


@dataclass(frozen=True, slots=True)
class Served:
    """A request that ended as it should: how it fared against what its class was promised, and what was predicted when
    it was admitted (None where nothing was).

    Classes are those of the promises, `custom` for numbers of the request's own, `default` and `best_effort`.
    """

    request_id: str
    slo_class: str
    outcome: Outcome
    predicted_ttft_s: float | None = None


def chunks_of(forwards: Seq[Mix]) -> tuple[Chunk, ...]:
    """The prompts' parts of forwards that are about to run."""
    return tuple(
        [
            Chunk(s.request_id, s.prefill_offset, draft.count, s.prefill_target, s.arrival, s.promise)
            for forward in forwards
            for draft in forward.chunks
            for s in (draft.sequence,)
        ]
    )


def outcome_of(sequence: Sequence) -> Outcome | None:
    """How a sequence fared; None where it never had a token."""
    if sequence.first_token_at is None or sequence.last_token_at is None:
        return None
    gaps = len(sequence.tokens) - len(sequence.request.prompt) - len(sequence.request.produced) - 1
    return Outcome(
        ttft_s=sequence.first_token_at - sequence.arrival,
        tpot_s=(sequence.last_token_at - sequence.first_token_at) / gaps if gaps > 0 else None,
        largest_gap_s=sequence.largest_gap_s if gaps > 0 else None,
        promise=sequence.promise,
    )
