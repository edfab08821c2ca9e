"""How prompts share a budget of tokens: in their order, but that the oldest keeps a part wherever it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

from scheduler.policies.base import Draft, fill_with_chunks
from scheduler.request import Sequence
from scheduler.roofline import Features

OLDEST_PART = 32
"""One in so many tokens is the oldest prompt's (at least one token): ageing, so that it is served in the end."""


_order = attrgetter("order")
_made = tuple.__new__


class Share(NamedTuple):
    """What a budget comes to: the iteration's features, and which prompts it completes: so many of `Sharing.line` from
    its start, and perhaps the one aside."""

    features: Features
    completed: int
    completes_aside: bool


class Sharing:
    """Any budget up to `cap` shared among prompts, in an iteration that also has the features `others`.

    Sums over the prompts are made once, so that a budget is looked up in them and not shared out: whoever searches for
    the largest budget asks for a dozen. `line` are the prompts in their order; `aside` is the oldest where it is not
    the first of them.
    """

    def __init__(self, prefills: Seq[Sequence], cap: int, others: Features) -> None:
        oldest = min(prefills, key=_order) if len(prefills) > 1 else prefills[0]
        self.aside = None if prefills[0] is oldest else oldest
        self.line = list(prefills) if self.aside is None else [s for s in prefills if s is not self.aside]
        self._whole, with_these = [others], others  # the features with so many of the line's prompts, each to its end
        for sequence in self.line:
            if with_these.prefill_tokens >= cap:
                break
            with_these = with_these.with_chunk(sequence.prefill_offset, sequence.prefill_remaining)
            self._whole.append(with_these)
        self._tokens = [features.prefill_tokens for features in self._whole]

    @property
    def completable(self) -> list[Sequence]:
        """Those of the line that the cap completes, and perhaps one more."""
        return self.line[: len(self._whole) - 1]

    def of(self, budget: int) -> Share:
        tokens, for_aside = self._tokens, 0
        if self.aside is None:
            for_line = budget if budget < tokens[-1] else tokens[-1]
        else:
            for_line, for_aside = self._split(budget)
        completed = bisect_right(tokens, for_line) - 1
        features, rest = self._whole[completed], for_line - tokens[completed]
        if rest:
            features = features.with_chunk(self.line[completed].prefill_offset, rest)
        if self.aside is None or not for_aside:
            return _made(Share, (features, completed, False))
        features = features.with_chunk(self.aside.prefill_offset, for_aside)
        return Share(features, completed, for_aside == self.aside.prefill_remaining)

    def chunks(self, budget: int) -> list[Draft]:
        for_line, for_aside = self._split(budget)
        chunks = fill_with_chunks(self.line, for_line)
        if self.aside is not None and for_aside:
            chunks.append(Draft(self.aside, for_aside))
        return chunks

    def _split(self, budget: int) -> tuple[int, int]:
        """Tokens for the line and for the one aside, which also has what the line leaves."""
        if self.aside is None or budget <= 0:
            return min(budget, self._tokens[-1]), 0
        kept = min(max(1, budget // OLDEST_PART), self.aside.prefill_remaining)
        for_line = min(budget - kept, self._tokens[-1])
        return for_line, min(budget - for_line, self.aside.prefill_remaining)
