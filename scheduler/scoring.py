"""Log-probabilities of prompts: which chunks are to give them, and what has come of them.

A chunk that covers positions start .. end - 1 gives those of the tokens at start + 1 .. end, as far as they are of the
prompt. What is computed again after a preemption is not told twice: `Sequence.prompt_logprobs` grows in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from scheduler.request import Phase, Sequence, TokenLogprob


class Scored(NamedTuple):
    """A chunk from position `start` on that gives log-probabilities of the prompt."""

    sequence: Sequence
    start: int


def gives_scores(sequence: Sequence, start: int, end: int) -> bool:
    """Whether a chunk of these positions has some that are wanted and not known yet."""
    wanted = sequence.scores_wanted
    return start < wanted and min(end, wanted) > len(sequence.prompt_logprobs)


def learn_scores(scored: Iterable[Scored], answers: Iterable[tuple[TokenLogprob, ...]]) -> list[tuple[Sequence, str]]:
    """Take what came of each chunk. Returns sequences that cannot go on, with the reason."""
    broken = []
    for (sequence, start), answer in zip(scored, answers, strict=True):
        if sequence.phase is Phase.FINISHED:
            continue
        known = len(sequence.prompt_logprobs)
        if any(math.isnan(score.logprob) for score in answer):
            broken.append((sequence, "the model gave no finite scores"))
        elif start > known:
            broken.append((sequence, f"log-probabilities of its prompt from {known} to {start} are missing"))
        else:
            sequence.prompt_logprobs.extend(answer[known - start :])
    return broken
