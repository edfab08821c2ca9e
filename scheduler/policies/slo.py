"""`slo`: the budget of every iteration follows from the tightest promise in the batch.

The budget is the largest chunk total whose predicted iteration, allowed for by a learned quantile, ends before the
earliest due token: of any stream, and of any prompt that it completes. With nothing at risk it is the cap. Prompts
share it by their deadlines, those that wait for a slot included (`scheduler.entrance`). One that cannot meet its
promise, or only if others do not, yields to those that can (`scheduler.deadlines`), yet keeps a small share, so that it
is served in the end. Deadlines and relegation follow Niyama (ASPLOS 2026).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from scheduler.budget import NOTHING_WANTED, Batch, Decision
from scheduler.costmodel import Allowance, OnlineCostModel
from scheduler.entrance import Urgency
from scheduler.policies.base import Mix
from scheduler.policies.pace import Pace
from scheduler.policies.sharing import Sharing
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.search import largest
from scheduler.streams import Streams

DELIVERY_SHARE = 0.05
"""Of a TPOT, that the allowance for delivery may take at most."""
QUANTILES_BELOW = (0.95, 0.9, 0.75, 0.5)
REACH = 2
"""Iterations whose prompts hold a slot."""

PrefillOrder = Literal["deadline", "laxity"]


@dataclass(frozen=True, slots=True)
class SloSettings:
    """`quantile`: share of iterations that must end in time; `delivery_s`: and by how many seconds before a stream's
    token is due, since of two tokens the later one may take longer on its way to the client. `min_progress`: prompt
    tokens that are computed, whatever the streams were promised, once prompts have waited `patience` iterations without
    any, or where streams are late even without them. `tile`: granularity of the matrix kernels; a budget is cut to
    whole tiles where that costs it less than a tenth. `longest_s`: seconds that no iteration is planned to exceed for
    prompts, since who comes while it runs has to wait for its end. `prefill_order`: which of the prompts that can be in
    time is computed first, the one that is due first or the one that has least time to spare."""

    max_batched_tokens: int = 8192
    longest_s: float = math.inf
    quantile: float = 0.99
    delivery_s: float = 0.0
    min_progress: int = 16
    patience: int = 16
    tile: int = 1
    prefill_order: PrefillOrder = "deadline"


class SloBudget:
    """The token budget of an iteration from the deadlines of its streams (`scheduler.slo.Promise`)."""

    __slots__ = ("_iterations_without_prefill", "_tokens", "cost", "settings")

    def __init__(self, cost: OnlineCostModel, settings: SloSettings | None = None) -> None:
        self.cost = cost
        self.settings = settings or SloSettings()
        self._iterations_without_prefill = 0
        self._tokens = 0
        """Of the last iteration that had not all it might have: a guess at where the next one's deadline is."""

    def compose(self, batch: Batch) -> tuple[Decision, Mix]:
        """Prompt tokens for the prefills of a batch that has some, in the order given, at most the cap and never
        negative; and the iteration that comes of it."""
        decodes = Mix(batch.decodes).features
        wanted = sum([sequence.prefill_remaining for sequence in batch.prefills])
        sharing = Sharing(batch.prefills, min(self.settings.max_batched_tokens, wanted), decodes)
        decision = self._at_least_some(self._largest_in_time(batch, sharing, wanted, decodes))
        budget = decision.token_budget
        return decision, Mix(batch.decodes, sharing.chunks(budget), sharing.of(budget).features)

    def _at_least_some(self, decision: Decision) -> Decision:
        """Prompts get on sooner or later, whatever was promised to streams."""
        if decision.token_budget == 0:
            self._iterations_without_prefill += 1
            if self._iterations_without_prefill >= self.settings.patience:
                least = min(self.settings.min_progress, self.settings.max_batched_tokens)
                decision = decision._replace(token_budget=least, bound="progress")
        if decision.token_budget > 0:
            self._iterations_without_prefill = 0
        return decision

    def _largest_in_time(self, batch: Batch, sharing: Sharing, wanted: int, decodes: Features) -> Decision:
        cap = min(self.settings.max_batched_tokens, wanted)
        plain = self.cost.predict(decodes)
        allowance, allowed, tightest = self._allowance(batch, plain)
        if allowed is not None and allowance.of(plain) > allowed:
            return Decision(self._least(batch, sharing, allowance, plain, cap), "progress", allowed, tightest)

        def first_token_in(sequence: Sequence) -> float:
            """Seconds until it is due, if this iteration could bring it in time with no other prompt; or no bound."""
            left = sequence.next_token_due() - batch.now
            alone = decodes.with_chunk(sequence.prefill_offset, sequence.prefill_remaining)
            return left if allowance.of(self.cost.predict(alone)) <= left else math.inf

        line_due = list(accumulate(map(first_token_in, sharing.completable), min, initial=math.inf))
        aside_due = math.inf if sharing.aside is None else first_token_in(sharing.aside)
        predict, longest_s, min_progress = self.cost.predict, self.settings.longest_s, self.settings.min_progress
        misses: dict[int, str] = {}

        def late(tokens: int) -> str:
            """Which deadline an iteration with so many prompt tokens would miss; none: empty."""
            features, completed, completes_aside = sharing.of(tokens)
            planned = predict(features)
            ends = allowance.of(planned)
            if allowed is not None and ends > allowed:
                return "deadline"
            if planned > longest_s and tokens > min_progress:
                return "newcomers"
            due = min(line_due[completed], aside_due) if completes_aside else line_due[completed]
            return "first_token" if ends > due else ""

        def in_time(tokens: int) -> bool:
            misses[tokens] = missed = late(tokens)
            return not missed

        fits = largest(in_time, cap, guess=self._tokens - decodes.decodes)
        bound = "prompts" if cap == wanted else "cap"
        if fits < cap:
            bound, self._tokens = misses[fits + 1], fits + decodes.decodes
        return Decision(self._whole_tiles(fits, len(batch.decodes)), bound, allowed, tightest)

    def _least(self, batch: Batch, sharing: Sharing, allowance: Allowance, plain: float, cap: int) -> int:
        """Prompt tokens where a stream is late with and without them, so that to starve prompts would help nobody: the
        least progress, as far as those streams allow it that an iteration without prompts would save."""
        delivery, without = self.settings.delivery_s, allowance.of(plain)
        left = seconds_left(batch.decodes, batch.now, delivery)
        held = [held_to(*stream, without, delivery) for stream in zip(batch.decodes, left, strict=True)]
        saved = min([seconds for seconds in held if seconds >= without], default=math.inf)

        def in_time(tokens: int) -> bool:
            return allowance.of(self.cost.predict(sharing.of(tokens).features)) <= saved

        return largest(in_time, min(self.settings.min_progress, cap))

    def _allowance(self, batch: Batch, plain: float) -> tuple[Allowance, float | None, str | None]:
        """By how much to allow for iterations that take longer than predicted, and the tightest stream under it.

        Where iterations scatter so much that not even those without a prompt would end in time that often, prompts are
        not what makes streams late, and to starve them would not help: then the highest quantile is taken at which an
        iteration without them does end in time, or the median.
        """
        delivery = self.settings.delivery_s
        streams = batch.decodes.due_first if isinstance(batch.decodes, Streams) else batch.decodes
        left = seconds_left(streams, batch.now, delivery)
        for quantile in (self.settings.quantile, *QUANTILES_BELOW):
            allowance = self.cost.allowance(min(quantile, self.settings.quantile))
            within = allowance.of(plain)
            if len(streams) < len(batch.decodes) and min(left) < within:  # who is late, only asking each can tell
                streams, left = batch.decodes, seconds_left(batch.decodes, batch.now, delivery)
            allowed, tightest = tightest_stream(streams, left, within, delivery)
            if allowed is None or within <= allowed:
                break
        return allowance, allowed, tightest

    def _whole_tiles(self, budget: int, decodes: int) -> int:
        """Cut the iteration's tokens to whole tiles where the cut is small: 257 tokens cost what 384 do."""
        over = (budget + decodes) % self.settings.tile
        return budget - over if over * 10 < budget else budget


class SloPolicy:
    """All decodes, and chunks of the most urgent prompts up to the budget, in one fused forward."""

    __slots__ = ("budget", "decision", "pace")

    name: ClassVar[str] = "slo"

    def __init__(self, budget: SloBudget) -> None:
        self.decision: Decision = NOTHING_WANTED
        self.budget = budget
        self.pace = Pace(budget.cost)

    @property
    def urgency(self) -> Urgency:
        """With as many prompts as iterations have had room for lately; where they had more, as many as there can be."""
        budget, most = self.decision, self.budget.settings.max_batched_tokens
        filled = budget.bound not in ("none", "prompts", "cap")
        reach = max(1, min(most, REACH * budget.token_budget)) if filled else most
        return Urgency(reach, self.pace.rest_of)

    def compose(self, batch: Batch) -> list[Mix]:
        if not batch.prefills:
            self.decision = NOTHING_WANTED
            return [Mix(batch.decodes)] if batch.decodes else []
        ordered = Batch(self._by_urgency(batch), batch.decodes, batch.now)
        self.decision, fused = self.budget.compose(ordered)
        self.pace.learn(fused, self.decision)
        return [] if fused.empty else [fused]

    def victim(self, candidates: Seq[Sequence], now: float) -> Sequence:
        """Who loses least by waiting: of prompts that cannot keep their promise the youngest, or else who has most time
        left after all its tokens are computed again."""

        predict = self.budget.cost.predict

        def loses(sequence: Sequence) -> tuple[bool, float, int]:
            again = predict(Features().with_chunk(0, sequence.length))
            left = sequence.next_token_due() - now
            if sequence.first_token_at is None:
                ahead = Features().with_chunk(sequence.prefill_offset, sequence.prefill_remaining)
                if left < predict(ahead):
                    return False, 0.0, -sequence.order
            elif left < 0:  # a stream that is late is held to its pace, as for the budget: its past counts for nothing
                left = sequence.promise.pace_s
            return True, again - left, -sequence.order

        return min(candidates, key=loses)

    def _by_urgency(self, batch: Batch) -> list[Sequence]:
        """Those that can meet their promise, the first to be due or with least laxity first, then those that cannot,
        oldest first. Laxity: the time until a prompt is due less what is left to be computed of it."""
        by_laxity = self.budget.settings.prefill_order == "laxity"
        hopeful, hopeless = [], []
        for sequence in batch.prefills:
            due = sequence.wanted_at()
            begin_by = due - self.pace.alone(sequence) * self.budget.cost.of_prompts
            if not sequence.yields and begin_by >= batch.now:
                hopeful.append((begin_by if by_laxity else due, sequence.order, sequence))
            else:
                hopeless.append((sequence.order, sequence))
        return [sequence for *_, sequence in sorted(hopeful)] + [sequence for _, sequence in sorted(hopeless)]


def seconds_left(decodes: Seq[Sequence], now: float, delivery: float) -> list[float]:
    """Until each of the streams' next tokens has to be there."""
    firsts = [sequence.first_token_at for sequence in decodes if sequence.first_token_at is not None]
    promises = [sequence.promise for sequence in decodes]
    alike = len(firsts) == len(decodes) == promises.count(promises[0]) if decodes else False
    if not alike or promises[0].tbt_s is not None:
        return [sequence.next_token_due() - now - earlier(sequence, delivery) for sequence in decodes]
    # Nearly always all have one promise. As `next_token_due` has it: all tokens of a stream but one have KV.
    pace, early = promises[0].tpot_s, earlier(decodes[0], delivery)
    return [
        first + (sequence.computed + 1 - sequence.given) * pace - now - early
        for first, sequence in zip(firsts, decodes, strict=True)
    ]


def tightest_stream(
    decodes: Seq[Sequence], left: Seq[float], plain: float, delivery: float = 0.0
) -> tuple[float | None, str | None]:
    """Seconds until the first of the streams' next tokens is due, and whose that is; `left` are those of each.

    One that not even a plain decode iteration (`plain` seconds) can save is late already, and only held to its pace:
    its past must not starve everybody's prompts.
    """
    if not decodes:
        return None, None
    allowed, tightest = min(left), ""
    if allowed >= plain:
        return allowed, min([of.request_id for of, seconds in zip(decodes, left, strict=True) if seconds == allowed])
    allowed = math.inf
    for sequence, until_due in zip(decodes, left, strict=True):
        seconds = held_to(sequence, until_due, plain, delivery)
        if seconds < allowed or (seconds == allowed and sequence.request_id < tightest):
            allowed, tightest = seconds, sequence.request_id
    return allowed, tightest


def held_to(sequence: Sequence, left: float, plain: float, delivery: float) -> float:
    """Seconds until a stream's next token is due; of one that a plain iteration is too late for, its pace."""
    return left if left >= plain else sequence.promise.tpot_s - earlier(sequence, delivery)


def earlier(sequence: Sequence, delivery: float) -> float:
    """Seconds by which a stream's token has to be there before it is due, so as to be delivered in time."""
    return min(delivery, DELIVERY_SHARE * sequence.promise.tpot_s)
