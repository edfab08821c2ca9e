"""The iteration plan: the only thing that a worker sees, and what it answers. Ordered, frozen, plain numbers.

A plan carries deltas: workers keep tokens, block tables and sampling of each slot between iterations. Within a plan the
order is: releases, admissions, then the forwards one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters a free slot. `tokens` are its prompt (`prompt_tokens` of them) and what it had produced."""

    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of one slot, at positions start .. start + count - 1, in one forward.

    `new_blocks` are appended to the slot's block table first. With `sample`, the token after the segment's last one is
    sampled from that position's logits and appended to the slot's tokens: that is what a later segment reads.
    """

    slot: int
    start: int
    count: int
    new_blocks: tuple[int, ...] = ()
    sample: bool = False


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One iteration. Every policy but `alternate` has exactly one forward in it."""

    iteration: int
    forwards: tuple[tuple[Segment, ...], ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for forward in self.forwards for segment in forward)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token of one slot. `error` is set instead where this one sequence could not be sampled (token -1)."""

    slot: int
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class IterationResult:
    """The worker group's answer to a plan: samples in the order of the sampling segments, seconds of each forward."""

    iteration: int
    samples: tuple[Sample, ...]
    forward_s: tuple[float, ...] = ()
