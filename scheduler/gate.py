"""Admission by promise: what a newcomer is predicted to get, and what happens where that is less than its promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from scheduler.caution import Caution, own
from scheduler.costmodel import CostModel, OnlineCostModel
from scheduler.entrance import makes_way
from scheduler.errors import RequestRefused
from scheduler.present import Present, Queue
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.search import largest
from scheduler.shares import Crowd, Outlook, Shares, Terms
from scheduler.slo import LONGEST_PROMISE_S, Grant, Promise
from scheduler.solver import Solver

OnInfeasible = Literal["reject", "relax", "best-effort"]
ROOM = 1.05
"""A relaxed promise is a little more than what was predicted, or noise alone would break it."""
LONGEST_WAY_S = 1.0
"""Between client and scheduler."""
_made = tuple.__new__
"""For what is made for each group that is asked: without the detour over its constructor."""


class Forecast(NamedTuple):
    """Seconds from a newcomer's arrival to its first token, of that the wait for a slot and blocks, and the plain
    decode step that it will then share, whose seconds only the group that takes it has to know. `begins_s`: until the
    first of the prompts there gets on, as it comes; `token_s`: for each of their tokens."""

    ttft_s: float
    wait_s: float
    shared: Features
    begins_s: float = 0.0
    token_s: float = 0.0


class Expected(NamedTuple):
    """What a newcomer would find with a group: seconds to its first token (None where nobody can tell), prompt tokens
    to be computed until then at the most, its own included, and sequences there. The least is the best."""

    ttft_s: float | None
    tokens: int
    sequences: int


class Gate:
    """Asks the solver. `allowing` gives what budgets allow for now, seconds for the predicted ones: it makes chunks
    smaller. Iterations then take what is predicted on the average, and a first token waits for many of them. What
    forecasts do not know is learned from promises that are missed (`caution`), but where nobody is refused."""

    __slots__ = (
        "_allowing", "_longest_s", "_on_infeasible", "_shares", "_solver", "_streams", "_tokens", "caution",
        "relax",
    )  # fmt: skip

    def __init__(
        self,
        solver: Solver,
        on_infeasible: OnInfeasible,
        allowing: Callable[[], Callable[[float], float]] = lambda: float,
        streams: Solver | None = None,
        longest_s: float = math.inf,
        relax: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`streams`: of the groups that generate, where those are others than compute prompts. `longest_s`: what the
        policy plans iterations to take at the most. `relax`: told where nobody is there, for what was learned of a
        machine that was busy may be over, and nobody finds out where everybody is refused for it."""
        self._solver, self._streams = solver, streams or solver
        self._on_infeasible = on_infeasible
        self._allowing = allowing
        self._longest_s = longest_s
        self.relax = relax
        self.caution = Caution()
        self._shares = Shares()
        self._tokens = 0
        """Of an iteration with as much of a newcomer as the streams allowed last: where tiles end, it is the same for
        the next one."""

    @property
    def divides(self) -> bool:
        """Whether a promise is given only where it can be kept, among tenants by their shares."""
        return self._on_infeasible != "best-effort"

    def judge(
        self, newcomer: Sequence, forecast: Forecast, there: Present, queue: Callable[[], Queue], now: float
    ) -> Grant | None:
        """None where its promise can be kept as far as anybody can tell, no other is broken for it, and its tenant has
        no more than its share or leaves room for others; or what it gets instead.

        Raises RequestRefused (`slo_infeasible`) where such requests are rejected. Leaves the forecast on the sequence.
        """
        newcomer.predicted_ttft_s = ttft = forecast.ttft_s
        asked = newcomer.promise
        self.caution.look(now, quiet=not there.tokens_to_compute)
        tpot = self._streams.cost.predict(forecast.shared)
        if self.divides:
            ttft = self._divided(newcomer, self._cautious(newcomer, forecast), tpot, there, queue, now)
        if ttft <= asked.ttft_s and tpot <= asked.tpot_s:
            return None
        if self._on_infeasible == "relax":
            return Grant(_kept(asked, ROOM * ttft, tpot), ttft)
        return Grant(_kept(asked, LONGEST_PROMISE_S if ttft > asked.ttft_s else 0.0, tpot), ttft, best_effort=True)

    def _divided(
        self,
        newcomer: Sequence,
        cautious: Forecast,
        tpot: float,
        there: Present,
        queue: Callable[[], Queue],
        now: float,
    ) -> float:
        """Seconds to its first token that can be promised it. Raises RequestRefused."""
        asked, rejects = newcomer.promise, self._on_infeasible == "reject"
        harms = self._harms(newcomer, cautious, there, now)
        ttft = _behind_all(newcomer, cautious, there) if harms else cautious.ttft_s
        kept = ttft <= asked.ttft_s and tpot <= asked.tpot_s
        outlook = self._outlook(newcomer, cautious, kept)
        among_others = self._shares.came(newcomer, outlook, now)
        if rejects and (harms or not kept):
            raise _refusal(asked, ttft, tpot, self._is_hopeless(newcomer))
        if among_others and (crowd := self._crowd(newcomer, outlook, queue(), now)) is not None:
            if rejects:
                raise _crowded(crowd)
            ttft = max(ttft, newcomer.request.age_s + crowd.part_s + _way_back(newcomer))
        self._shares.let_in(newcomer, outlook, now)
        return ttft

    def _crowd(self, newcomer: Sequence, outlook: Outlook, queue: Queue, now: float) -> Crowd | None:
        def of(other: Sequence, queue: Queue) -> Outlook:
            forecast = self.forecast(other, queue._replace(cached_tokens=other.reusable), now)
            tpot = self._streams.cost.predict(forecast.shared)
            forecast = self._cautious(other, forecast)
            kept = forecast.ttft_s <= other.promise.ttft_s and tpot <= other.promise.tpot_s
            return self._outlook(other, forecast, kept and not self._harms(other, forecast, queue.present, now))

        return self._shares.crowd(newcomer, outlook, queue, Terms(of, self._streams.cost.predict), now)

    def _outlook(self, newcomer: Sequence, cautious: Forecast, kept: bool) -> Outlook:
        takes_s = (newcomer.length - newcomer.reusable) * cautious.token_s / self.caution.factor
        waits_s = cautious.ttft_s - newcomer.request.age_s
        return Outlook(kept, cautious.begins_s, cautious.token_s, waits_s, takes_s)

    def _is_hopeless(self, newcomer: Sequence) -> bool:
        """Whether it would be refused if nobody else were there, on a machine that is no slower than it was."""
        late = own(self._alone_s(newcomer)) > newcomer.promise.ttft_s
        alone = Features(0, 1, newcomer.length)
        return late or _at_best(self._streams.cost, alone) > newcomer.promise.tpot_s

    def _alone_s(self, newcomer: Sequence) -> float:
        """Seconds of its prompt on a machine that does nothing else, and is no slower than it was."""
        tokens = newcomer.length - newcomer.reusable
        chunk = min(tokens, self._solver.cap)
        return _at_best(self._solver.cost, Features().with_chunk(newcomer.length // 2, chunk)) * tokens / chunk

    def learn(self, sequence: Sequence, now: float) -> None:
        """What was given a promise has its first token."""
        if sequence.predicted_ttft_s is not None and sequence.wanted_s is None:
            delivered = now - sequence.arrival + _way_back(sequence)
            self.caution.learn(delivered <= sequence.promise.ttft_s, now)

    def forecast(self, newcomer: Sequence, queue: Queue, now: float) -> Forecast:
        """As if nobody came after it: the prompts that are due before it go first, in chunks that the streams allow."""
        there = queue.present
        length = newcomer.length
        total = length - queue.cached_tokens
        if there.prompts:
            total += there.ahead_of(newcomer.due)
        chunk, whole = self._largest_chunk(there.decodes, length // 2, total, there.pace_s)
        iterations = math.ceil(total / chunk)
        # What is under way when it comes has to end first: half of an iteration on the average.
        step = whole if there.tokens_to_compute else self._solver.cost.predict(there.decodes)
        under_way = step / 2 if queue.running else 0.0
        wait = self._wait(newcomer, queue)
        age = now - newcomer.arrival
        sharing, lengths = len(queue.running), there.lengths
        if queue.elsewhere is not None:
            sharing, lengths = len(queue.elsewhere), sum([s.length for s in queue.elsewhere])
        sharing, lengths = sharing + 1, lengths + length
        shared = Features(0, sharing, lengths // sharing * sharing)
        begins = max(wait, under_way)
        ttft = age + begins + iterations * whole
        if chunk == total and (all_there := there.tokens_to_compute + length - queue.cached_tokens) > total:
            # An iteration that has more room takes prompts that are due later with it.
            chunk, whole = self._largest_chunk(there.decodes, length // 2, all_there, there.pace_s)
        return _made(Forecast, (ttft, wait, shared, begins, whole / chunk))

    def _largest_chunk(self, decodes: Features, offset: int, total: int, pace_s: float) -> tuple[int, float]:
        """Of `total` prompt tokens, that decodes of that pace allow; and the seconds that the iteration takes."""
        predict, allowing, longest_s = self._solver.cost.predict, self._allowing(), self._longest_s
        known: dict[int, float] = {}

        def keeps_pace(chunk: int) -> bool:
            known[chunk] = seconds = predict(decodes.with_chunk(offset, chunk))
            return seconds <= longest_s and allowing(seconds) <= pace_s

        most = min(total, self._solver.cap)
        chunk = largest(keeps_pace, most, 1, self._tokens - decodes.decodes)
        if chunk < most:
            self._tokens = chunk + decodes.decodes
        return chunk, known[chunk] if chunk in known else predict(decodes.with_chunk(offset, chunk))

    def _harms(self, newcomer: Sequence, forecast: Forecast, there: Present, now: float) -> bool:
        """Whether promises that were given would be broken for the newcomer's."""
        token_s = beside_s = forecast.token_s
        stays = self._streams is self._solver and newcomer.goes_on
        if stays and (there.owed[1] or there.is_due_after(newcomer.due)):
            streams = there.decodes.decodes + 1, there.decodes.decode_context + newcomer.length
            pace_s = min(there.pace_s, newcomer.promise.pace_s)
            offset, tokens = newcomer.length // 2, there.tokens_to_compute
            chunk, whole = self._largest_chunk(Features(0, *streams), offset, tokens, pace_s)
            beside_s = max(token_s, self.caution.factor * whole / chunk)
        return there.harmed_by(newcomer, now + forecast.begins_s, token_s, beside_s)

    def _cautious(self, newcomer: Sequence, forecast: Forecast) -> Forecast:
        """With what was learned, and the way back to the client."""
        factor, age = self.caution.factor, newcomer.request.age_s
        return forecast._replace(
            ttft_s=age + self.caution.of(forecast.ttft_s - age, self._alone_s(newcomer)) + _way_back(newcomer),
            begins_s=factor * forecast.begins_s,
            token_s=factor * forecast.token_s,
        )

    def _wait(self, newcomer: Sequence, queue: Queue) -> float:
        """Seconds until enough streams have ended for those who wait before the newcomer, and for itself, to have slots
        and blocks, if all of them generate what they may: a stop token comes sooner, so that this is the most."""
        if queue.elsewhere is not None:
            return 0.0  # nobody stays: what has to end is the prompts ahead, which are counted
        waiting = queue.waiting
        before = [s for s in waiting if not s.yields and s.due <= newcomer.due] if waiting else []
        slots = len(before) + 1 - queue.free_slots
        blocks = queue.blocks_for(newcomer.length) - queue.free_blocks
        if before:
            blocks += sum([queue.blocks_for(s.length) for s in before])
        if slots <= 0 and blocks <= 0:
            return 0.0
        steps = 0
        for tokens, held in sorted((_tokens_left(s, newcomer), len(s.blocks)) for s in queue.running):
            if slots <= 0 and blocks <= 0:
                break
            steps, slots, blocks = tokens, slots - 1, blocks - held
        if slots > 0 and queue.running:  # more wait than run: they go through in rounds
            steps += steps * slots // len(queue.running)
        return steps * self._solver.cost.predict(queue.present.decodes)


def _at_best(cost: CostModel, features: Features) -> float:
    """Where what makes the machine slower than it was is over."""
    predicted = cost.predict(features)
    return min(predicted, cost.base.predict(features)) if isinstance(cost, OnlineCostModel) else predicted


def _way_back(sequence: Sequence) -> float:
    """Seconds from the first token to the client, taken to be as many as the way here was. Who is much older has
    waited for something else: a scheduler that was away, its own slow sending."""
    return min(sequence.request.age_s, LONGEST_WAY_S)


def _behind_all(newcomer: Sequence, forecast: Forecast, there: Present) -> float:
    """Seconds to its first token, if every prompt that is there went first."""
    tokens = there.tokens_to_compute + newcomer.length - newcomer.reusable
    latest = newcomer.request.age_s + forecast.begins_s + tokens * forecast.token_s + _way_back(newcomer)
    return max(forecast.ttft_s, latest)


def _refusal(asked: Promise, ttft_s: float, tpot_s: float, hopeless: bool) -> RequestRefused:
    """Of a promise, where so much is predicted."""
    late = max(0.0, ttft_s - asked.ttft_s)
    parts = []
    if late:
        parts.append(f"the first token is predicted in {_ms(ttft_s)}, {_ms(asked.ttft_s)} are promised")
    if tpot_s > asked.tpot_s:
        parts.append(f"a token every {_ms(tpot_s)} is predicted, every {_ms(asked.tpot_s)} is promised")
    if not parts:
        parts.append("prompts that were promised a first token before would be late for it")
    when, advice = "now", "ask for less, or try again later"
    if hopeless:
        when, advice = "here", "ask for less: with nobody else here it could not be kept either"
    message = f"the promise cannot be kept {when}: {' and '.join(parts)}; {advice}"
    return RequestRefused("slo_infeasible", message, "slo", retry_after_s=math.inf if hopeless else max(1.0, late))


def _crowded(crowd: Crowd) -> RequestRefused:
    message = (
        "the promise could be kept, but not beside those that others may ask for, who have less than their share of "
        "the server; try again later"
    )
    return RequestRefused("slo_infeasible", message, "slo", retry_after_s=max(1.0, crowd.retry_after_s))


def _kept(asked: Promise, ttft_s: float, tpot_s: float) -> Promise:
    """What can be promised instead, where a token is predicted every `tpot_s`."""
    tpot = max(asked.tpot_s, ROOM * tpot_s) if tpot_s > asked.tpot_s else asked.tpot_s
    tbt = None if asked.tbt_s is None else max(asked.tbt_s, tpot)
    return Promise(min(LONGEST_PROMISE_S, max(asked.ttft_s, ttft_s)), min(LONGEST_PROMISE_S, tpot), tbt)


def _tokens_left(sequence: Sequence, newcomer: Sequence) -> int:
    """Until it is out of the newcomer's way."""
    if sequence.prefilling and makes_way(sequence, newcomer):
        return 0
    return sequence.prefill_remaining + sequence.request.max_tokens - sequence.generated


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
