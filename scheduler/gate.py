"""Admission by promise: what a newcomer is predicted to get, and what happens where that is less than its promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

from scheduler.entrance import makes_way
from scheduler.errors import RequestRefused
from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.running import Running
from scheduler.search import largest
from scheduler.slo import LONGEST_PROMISE_S, Grant, Promise
from scheduler.solver import Solver

OnInfeasible = Literal["reject", "relax", "best-effort"]
ROOM = 1.05
"""A relaxed promise is a little more than what was predicted, or noise alone would break it."""


class Present(NamedTuple):
    """Who is there where a newcomer comes: the streams as an iteration has them, the pace of the tightest, the prompts
    with when they are due and their tokens left, but for those that yield to any that can be in time, the lengths of
    all that run, and the tokens of all prompts."""

    decodes: Features
    pace_s: float
    prompts: Seq[tuple[float, int]]
    lengths: int
    tokens_to_compute: int

    @classmethod
    def of(cls, running: Running, waiting: Seq[Sequence]) -> Present:
        """Asked about many groups for each request: nobody looks at each of their streams for it."""
        computing, ending = running.prompts, running.ending
        streams = len(running.streams) + len(ending)
        contexts = running.streams.context + sum([sequence.computed for sequence in ending])
        pace = min([running.streams.pace_s, *[sequence.promise.pace_s for sequence in ending]])
        lengths = contexts + streams + sum([sequence.length for sequence in computing])  # of a stream all but the last
        left = [(s, s.length - s.computed) for s in computing] + [(s, s.length - s.reusable) for s in waiting]
        prompts = [(sequence.due, tokens) for sequence, tokens in left if not sequence.yields]
        return cls(Features(0, streams, contexts), pace, prompts, lengths, sum([tokens for _, tokens in left]))

    def ahead_of(self, due: float) -> int:
        """Tokens of prompts that go before one that is due then."""
        return sum([left for at, left in self.prompts if at <= due])


class Queue(NamedTuple):
    """What a newcomer finds: sequences that hold a slot, those that wait for one, what is free, and how many of its
    tokens have KV already."""

    present: Present
    running: Seq[Sequence]
    waiting: Seq[Sequence]
    free_slots: int
    free_blocks: int
    blocks_for: Callable[[int], int]
    cached_tokens: int = 0
    elsewhere: Seq[Sequence] | None = None
    """The streams of the group that will generate, where that is another one: here are prompts alone then."""


class Forecast(NamedTuple):
    """Seconds from a newcomer's arrival to its first token, of that the wait for a slot and blocks, and the plain
    decode step that it will then share, whose seconds only the group that takes it has to know."""

    ttft_s: float
    wait_s: float
    shared: Features


class Expected(NamedTuple):
    """What a newcomer would find with a group: seconds to its first token (None where nobody can tell), prompt tokens
    to be computed until then at the most, its own included, and sequences there. The least is the best."""

    ttft_s: float | None
    tokens: int
    sequences: int


class Gate:
    """Asks the solver. `allowing` gives what budgets allow for now, seconds for the predicted ones: it makes chunks
    smaller. Iterations then take what is predicted on the average, and a first token waits for many of them."""

    def __init__(
        self,
        solver: Solver,
        on_infeasible: OnInfeasible,
        allowing: Callable[[], Callable[[float], float]] = lambda: float,
        streams: Solver | None = None,
    ) -> None:
        """`streams`: of the groups that generate, where those are others than compute prompts."""
        self._solver, self._streams = solver, streams or solver
        self._on_infeasible = on_infeasible
        self._allowing = allowing
        self._tokens = 0
        """Of an iteration with as much of a newcomer as the streams allowed last: where tiles end, it is the same for
        the next one."""

    def judge(self, newcomer: Sequence, forecast: Forecast) -> Grant | None:
        """None where its promise can be kept as far as anybody can tell, or what it gets instead.

        Raises RequestRefused (`slo_infeasible`) where such requests are rejected. Leaves the forecast on the sequence.
        """
        newcomer.predicted_ttft_s = forecast.ttft_s
        asked, ttft = newcomer.promise, forecast.ttft_s
        tpot = self._streams.cost.predict(forecast.shared)
        if ttft <= asked.ttft_s and tpot <= asked.tpot_s:
            return None
        if self._on_infeasible == "reject":
            raise _refusal(asked, ttft, tpot)
        if self._on_infeasible == "relax":
            return Grant(_kept(asked, ROOM * ttft, tpot), ttft)
        return Grant(_kept(asked, LONGEST_PROMISE_S if ttft > asked.ttft_s else 0.0, tpot), ttft, best_effort=True)

    def forecast(self, newcomer: Sequence, queue: Queue, now: float) -> Forecast:
        """As if nobody came after it: the prompts that are due before it go first, in chunks that the streams allow."""
        there = queue.present
        predict, decodes, pace_s = self._solver.cost.predict, there.decodes, there.pace_s
        length = newcomer.length
        total, offset = there.ahead_of(newcomer.due) + length - queue.cached_tokens, length // 2

        allowing, known = self._allowing(), dict[int, float]()

        def keeps_pace(chunk: int) -> bool:
            known[chunk] = seconds = predict(decodes.with_chunk(offset, chunk))
            return allowing(seconds) <= pace_s

        most = min(total, self._solver.cap)
        chunk = largest(keeps_pace, most, 1, self._tokens - decodes.decodes)
        if chunk < most:
            self._tokens = chunk + decodes.decodes
        iterations = math.ceil(total / chunk)
        whole = known[chunk] if chunk in known else predict(decodes.with_chunk(offset, chunk))
        # What is under way when it comes has to end first: half of an iteration on the average.
        under_way = (whole if there.tokens_to_compute else predict(decodes)) / 2 if queue.running else 0.0
        wait = self._wait(newcomer, queue)
        age = now - newcomer.arrival
        sharing, lengths = len(queue.running), there.lengths
        if queue.elsewhere is not None:
            sharing, lengths = len(queue.elsewhere), sum([s.length for s in queue.elsewhere])
        sharing, lengths = sharing + 1, lengths + length
        shared = Features(0, sharing, lengths // sharing * sharing)
        return Forecast(age + max(wait, under_way) + iterations * whole, wait, shared)

    def _wait(self, newcomer: Sequence, queue: Queue) -> float:
        """Seconds until enough streams have ended for those who wait before the newcomer, and for itself, to have slots
        and blocks, if all of them generate what they may: a stop token comes sooner, so that this is the most."""
        if queue.elsewhere is not None:
            return 0.0  # nobody stays: what has to end is the prompts ahead, which are counted
        before = [s for s in queue.waiting if not s.yields and s.due <= newcomer.due]
        slots = len(before) + 1 - queue.free_slots
        blocks = sum([queue.blocks_for(s.length) for s in (*before, newcomer)]) - queue.free_blocks
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


def _refusal(asked: Promise, ttft_s: float, tpot_s: float) -> RequestRefused:
    """Of a promise, where so much is predicted."""
    late = max(0.0, ttft_s - asked.ttft_s)
    parts = []
    if late:
        parts.append(f"first token is predicted in {_ms(ttft_s)}, {_ms(asked.ttft_s)} are promised")
    if tpot_s > asked.tpot_s:
        parts.append(f"a token every {_ms(tpot_s)} is predicted, every {_ms(asked.tpot_s)} is promised")
    message = f"the promise cannot be kept now: the {' and '.join(parts)}; ask for less, or try again later"
    return RequestRefused("slo_infeasible", message, "slo", retry_after_s=max(1.0, late))


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
