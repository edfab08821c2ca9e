"""The iteration plan: the only thing that a worker sees, and what it answers. Ordered, frozen, plain numbers.

A plan carries deltas: workers keep tokens, block tables and sampling of each slot between iterations. Within a plan the
order is: releases, admissions, swaps, then the forwards one after another. What comes in thousands, decodes and their
tokens, is in columns of plain integers: an object for each would cost more than all that is decided about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters a free slot. `tokens` are its prompt (`prompt_tokens` of them) and what it had produced.

    The KV of its first `computed` tokens is there already, in `blocks`, its block table so far.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    computed: int = 0
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of one slot, at positions start .. start + count - 1, in one forward.

    `new_blocks` are appended to the slot's block table first. With `sample`, the token after the segment's last one is
    sampled from that position's logits and appended to the slot's tokens: that is what a later segment reads. With
    `score`, the log-probability of the token after each of its tokens is told, as far as those are of the prompt.
    """

    slot: int
    start: int
    count: int
    new_blocks: tuple[int, ...] = ()
    sample: bool = False
    score: bool = False


class Forward(NamedTuple):
    """A token of each slot in `decodes`, and the `chunks`, side by side in one forward. No slot is in it twice.

    A decode computes its slot's last token, the only one without KV, and samples the next: a segment of one token, with
    `sample`. `new_blocks` are (slot, block), appended to the block tables of decodes that go past the end of theirs.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[Segment, ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks of KV to as many of host memory, or back, pair by pair. Swaps are carried out in the order of the plan."""

    to_host: bool
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class IterationPlan(NamedTuple):
    """One iteration. Every policy but `alternate` has exactly one forward in it."""

    iteration: int
    forwards: tuple[Forward, ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    swaps: tuple[Swap, ...] = ()


class IterationResult(NamedTuple):
    """The worker group's answer to a plan: `tokens` sampled in the order of the plan, a forward's decodes before its
    chunks; log-probabilities by their index where they were asked for; seconds of each forward.

    `prompt_logprobs` are of each chunk with `score`, in the order of the plan.

    Where one sequence could not be sampled its token is NO_TOKEN, and `errors` says why by the same index.
    """

    iteration: int
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    forward_s: tuple[float, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
