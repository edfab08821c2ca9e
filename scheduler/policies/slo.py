"""`slo`: the budget of every iteration follows from the tightest promise in the batch.

The budget is the largest chunk total whose predicted iteration, allowed for by a learned quantile, ends before the
earliest due token: of any stream, and of any prompt that it completes. With nothing at risk it is the cap. Prompts
share it by least laxity. One that can no longer meet its promise yields to those that can, yet keeps a small share, so
that it is served in the end. Deadlines and relegation follow Niyama (ASPLOS 2026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import ClassVar

from scheduler.budget import NOTHING_WANTED, Batch, Decision
from scheduler.costmodel import CostModel, OnlineCostModel
from scheduler.policies.base import Draft, Forward, YoungestVictim, decode_all, fill_with_chunks
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.search import largest


@dataclass(frozen=True, slots=True)
class SloSettings:
    """`quantile`: share of iterations that must end in time. `min_progress`: prompt tokens that are computed, whatever
    the streams were promised, once prompts have waited `patience` iterations without any. `tile`: granularity of the
    matrix kernels; a budget is cut to whole tiles where that costs it less than a tenth. `longest_s`: seconds that no
    iteration is planned to exceed for prompts, since who comes while it runs has to wait for its end."""

    max_batched_tokens: int = 8192
    longest_s: float = math.inf
    quantile: float = 0.95
    min_progress: int = 16
    patience: int = 16
    tile: int = 1


class SloBudget:
    """The token budget of an iteration from the deadlines of its streams (`scheduler.slo.Promise`)."""

    def __init__(self, cost: OnlineCostModel, settings: SloSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or SloSettings()
        self._iterations_without_prefill = 0

    def decide(self, batch: Batch) -> Decision:
        """Prompt tokens for the batch's prefills in the order given; at most the cap, and never negative."""
        decision = self._largest_in_time(batch)
        if batch.prefills and decision.token_budget == 0:
            self._iterations_without_prefill += 1
            if self._iterations_without_prefill >= self.settings.patience:
                least = min(self.settings.min_progress, self.settings.max_batched_tokens)
                decision = replace(decision, token_budget=least, bound="progress")
        if decision.token_budget > 0:
            self._iterations_without_prefill = 0
        return decision

    def _largest_in_time(self, batch: Batch) -> Decision:
        decodes = decode_features(batch.decodes)
        wanted = sum(sequence.prefill_remaining for sequence in batch.prefills)
        cap = min(self.settings.max_batched_tokens, wanted)
        margin = self.cost.margin(self.settings.quantile)
        plain = self.cost.predict(decodes) * margin
        due = [(time_allowed(sequence, batch.now, plain), sequence.request_id) for sequence in batch.decodes]
        allowed, tightest = min(due, default=(None, None))
        first_tokens = {}  # what this iteration could still bring in time, if other prompts do not lengthen it
        for sequence in batch.prefills:
            alone = decodes.with_chunk(sequence.prefill_offset, sequence.prefill_remaining)
            if self.cost.predict(alone) * margin <= sequence.next_token_due() - batch.now:
                first_tokens[sequence.request_id] = sequence.next_token_due() - batch.now

        def late(tokens: int) -> str:
            """Which deadline an iteration with so many prompt tokens would miss; none: empty."""
            drafts = share(batch.prefills, tokens)
            ends = self.cost.predict(with_drafts(decodes, drafts)) * margin
            if allowed is not None and ends > allowed:
                return "deadline"
            if ends > self.settings.longest_s and tokens > self.settings.min_progress:
                return "newcomers"
            completed = (draft.sequence for draft in drafts if draft.count == draft.sequence.prefill_remaining)
            in_time = all(ends <= first_tokens.get(sequence.request_id, math.inf) for sequence in completed)
            return "" if in_time else "first_token"

        fits = largest(lambda tokens: not late(tokens), cap)
        bound = late(fits + 1) if fits < cap else "prompts" if cap == wanted else "cap"
        return Decision(self._whole_tiles(fits, len(batch.decodes)), bound, allowed, tightest)

    def _whole_tiles(self, budget: int, decodes: int) -> int:
        """Cut the iteration's tokens to whole tiles where the cut is small: 257 tokens cost what 384 do."""
        over = (budget + decodes) % self.settings.tile
        return budget - over if over * 10 < budget else budget


class SloPolicy(YoungestVictim):
    """All decodes, and chunks of the prompts by least laxity up to the budget, in one fused forward."""

    name: ClassVar[str] = "slo"

    def __init__(self, budget: SloBudget) -> None:
        self.budget = budget

    def compose(self, batch: Batch) -> list[Forward]:
        ordered = Batch(self._by_laxity(batch), batch.decodes, batch.now)
        decodes = decode_all(batch.decodes)
        self.decision = self.budget.decide(ordered) if ordered.prefills else NOTHING_WANTED
        forward = decodes + share(ordered.prefills, self.decision.token_budget)
        return [forward] if forward else []

    def _by_laxity(self, batch: Batch) -> list[Sequence]:
        """Those that can meet their promise by least laxity, then those that cannot, oldest first."""
        spare = {sequence.request_id: laxity(sequence, batch.now, self.budget.cost) for sequence in batch.prefills}
        hopeful = [sequence for sequence in batch.prefills if spare[sequence.request_id] >= 0]
        hopeless = [sequence for sequence in batch.prefills if spare[sequence.request_id] < 0]
        hopeful.sort(key=lambda sequence: (spare[sequence.request_id], sequence.order))
        return hopeful + sorted(hopeless, key=lambda sequence: sequence.order)


def decode_features(decodes: Seq[Sequence]) -> Features:
    return Features(decodes=len(decodes), decode_context=sum(sequence.computed + 1 for sequence in decodes))


def with_drafts(features: Features, drafts: Forward) -> Features:
    """The iteration with these chunks added."""
    for draft in drafts:
        features = features.with_chunk(draft.sequence.prefill_offset, draft.count)
    return features


def laxity(sequence: Sequence, now: float, cost: CostModel) -> float:
    """Seconds to spare if the prompt's remaining tokens were computed from now on with nothing else."""
    remaining = Features().with_chunk(sequence.prefill_offset, sequence.prefill_remaining)
    return sequence.next_token_due() - now - cost.predict(remaining)


def share(prefills: Seq[Sequence], budget: int) -> Forward:
    """Chunks in order; the oldest prompt keeps an eighth of the budget (at least a token) wherever it is: ageing."""
    if budget <= 0 or not prefills:
        return []
    oldest = min(prefills, key=lambda sequence: sequence.order)
    if prefills[0] is oldest:
        return fill_with_chunks(prefills, budget)
    kept = min(max(1, budget // 8), oldest.prefill_remaining)
    others = fill_with_chunks([sequence for sequence in prefills if sequence is not oldest], budget - kept)
    left = budget - sum(draft.count for draft in others)
    return [*others, Draft(oldest, min(left, oldest.prefill_remaining))]


def time_allowed(sequence: Sequence, now: float, plain: float) -> float:
    """Seconds until the stream's next token is due. One that not even a plain decode iteration (`plain` seconds) can
    save is late already, and only held to its pace: its past must not starve everybody's prompts."""
    left = sequence.next_token_due() - now
    return left if left >= plain else sequence.promise.tpot_s
