"""What the scheduler notes of plans under way and of tokens that came."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.policies import Forward
from scheduler.request import Sequence
from scheduler.roofline import Features


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan under way: who is sampled from, in the order of the plan, and what each of its forwards costs by."""

    sampling: list[Sequence]
    features: tuple[Features, ...]


@dataclass(frozen=True, slots=True)
class TokenTiming:
    """When a token came, in seconds since its request's arrival and since the token before it (None: the first)."""

    request_id: str
    since_arrival_s: float
    gap_s: float | None
    last: bool


def features_of(forward: Forward) -> Features:
    """The cost features of a forward that is about to run."""
    chunks, decodes, context = Features(), 0, 0
    for draft in forward:
        sequence = draft.sequence
        if sequence.prefilling:
            chunks = chunks.with_chunk(sequence.computed, draft.count)
        else:
            decodes += 1
            context += sequence.computed + 1
    return replace(chunks, decodes=decodes, decode_context=context)
