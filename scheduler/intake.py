"""What becomes of a request at the door: its promise, what it would find here, and what it is granted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from scheduler.blocks import BlockPool
from scheduler.errors import RequestRefused
from scheduler.gate import Expected, Forecast, Gate
from scheduler.line import Line
from scheduler.prefixes import Prefixes
from scheduler.present import Present, Queue
from scheduler.request import Phase, Request, Sequence
from scheduler.residents import Residents
from scheduler.slo import BEST_EFFORT_CLASS, CUSTOM_CLASS, DEFAULT_CLASS, Grant, Promise, PromiseBook, UnknownClass

_made = tuple.__new__
"""For what is made for each group that is asked: without the detour over its constructor."""


class _Told(NamedTuple):
    """A forecast, and what it was made of. `reusable` is here, since others are asked about the newcomer after that."""

    gate: Gate
    newcomer: Sequence
    now: float
    present: Present
    reusable: int
    forecast: Forecast

    def still_true(self, gate: Gate, newcomer: Sequence, now: float, present: Present) -> bool:
        known = self.newcomer
        same = self.gate is gate and known.request is newcomer.request and self.now == now and self.present is present
        return same and known.promise == newcomer.promise and known.arrival == newcomer.arrival


class Intake:
    """Of one scheduler, into whose lines and pool it looks."""

    __slots__ = (
        "_changes", "_latest", "_pool", "_prefixes", "_present", "_residents", "_told", "_waiting",
        "forecaster", "gate", "promises", "streams_elsewhere",
    )  # fmt: skip

    def __init__(self, waiting: Line, residents: Residents, pool: BlockPool, prefixes: Prefixes) -> None:
        self.promises = PromiseBook()
        self.gate: Gate | None = None
        self.forecaster: Gate | None = None
        """Who can tell a newcomer's time to first token, whether promises are judged by it or not."""
        self.streams_elsewhere: Callable[[], Seq[Sequence]] | None = None
        """The streams that a newcomer will share iterations with, where those run in another group."""
        self._waiting = waiting
        self._residents = residents
        self._pool = pool
        self._prefixes = prefixes
        self._present: Present | None = None
        self._told: _Told | None = None
        self._changes = 0
        self._latest: Sequence | None = None

    def newcomer(self, request: Request, now: float) -> Sequence:
        """What a request becomes. Raises RequestRefused for a class of service that is not known."""
        arrival, promise = now - request.age_s, self._promise(request)
        same = self._told.newcomer if self._told is not None and self._told.newcomer.request is request else None
        if same is not None and same.order < 0 and (same.arrival, same.promise) == (arrival, promise):  # nobody's yet
            same.reusable = 0
            return same
        tokens = [*request.prompt, *request.produced]
        sequence = Sequence(request=request, arrival=arrival, order=-1, tokens=tokens, promise=promise)
        sequence.slo_class = request.slo_class or (DEFAULT_CLASS if request.promise is None else CUSTOM_CLASS)
        sequence.due = sequence.wanted_at()
        if same is not None:
            sequence.digests = list(same.digests)
        return sequence

    def judge(self, sequence: Sequence, now: float) -> Grant | None:
        """What it is granted, and promised from then on, instead of what it asked for; None where that holds. Raises
        RequestRefused for a promise that cannot be kept, where those are rejected."""
        if self.gate is None:
            return None
        if not self._residents.line and not self._waiting:
            self.gate.relax(now)
        forecast = self._forecast(self.gate, sequence, now)
        grant = self.gate.judge(sequence, forecast, self.present, lambda: self._queue(sequence), now)
        if grant is not None:
            asked, sequence.promise = sequence.promise, grant.promise
            if grant.best_effort:
                sequence.wanted_s, sequence.yields = asked.ttft_s, True
                sequence.slo_class = BEST_EFFORT_CLASS
        return grant

    @property
    def divides(self) -> bool:
        """Whether tenants are given their shares by what they are promised."""
        return self.gate is not None and self.gate.divides

    def came(self, sequence: Sequence) -> None:
        """It was let in."""
        self._latest = sequence

    def first_token_of(self, sequence: Sequence, now: float) -> None:
        """It came."""
        if self.gate is not None:
            self.gate.learn(sequence, now)

    def expected(self, newcomer: Sequence, now: float) -> Expected:
        """What a newcomer would find here."""
        queue, gate, ttft = self._queue(newcomer), self.forecaster, None
        present, reusable = queue.present, queue.cached_tokens
        if gate is not None:
            forecast = gate.forecast(newcomer, queue, now)
            ttft, self._told = forecast.ttft_s, _made(_Told, (gate, newcomer, now, present, reusable, forecast))
        tokens = present.tokens_to_compute + newcomer.length - reusable
        return _made(Expected, (ttft, tokens, len(queue.running) + len(queue.waiting)))

    def _forecast(self, gate: Gate, newcomer: Sequence, now: float) -> Forecast:
        """What it was told before it came, where nothing has changed since."""
        told = self._told
        if told is not None and told.still_true(gate, newcomer, now, self.present):
            newcomer.reusable = told.reusable
            return told.forecast
        return gate.forecast(newcomer, self._queue(newcomer), now)

    def changed(self) -> None:
        """Somebody got on. Who comes and who goes is seen without."""
        self._present = self._told = None

    @property
    def present(self) -> Present:
        """Worked out once for all who ask before something changes: of a thousand groups, the emptiest are asked about
        every newcomer."""
        changes = self._residents.line.changes + self._waiting.changes
        if self._present is None or changes != self._changes:
            self._present, self._changes = Present.of(self._residents.line, self._waiting), changes
        return self._present

    @property
    def tokens_to_compute(self) -> int:
        """Of prompts, running and waiting."""
        return self.present.tokens_to_compute

    def _queue(self, newcomer: Sequence) -> Queue:
        streams, residents, pool = self.streams_elsewhere, self._residents, self._pool
        reusable, latest = len(self._prefixes.found(newcomer)) * pool.block_size, self._latest
        if latest is not None and latest.first_token_at is None and latest.phase is not Phase.FINISHED:
            reusable = max(reusable, self._prefixes.shared_by(latest, newcomer))
        newcomer.reusable = reusable
        lines, there = (residents.line, self._waiting), None if streams is None else streams()
        free = residents.free_slots, pool.available, pool.blocks_for, pool.total
        return _made(Queue, (self.present, *lines, *free, reusable, there))

    def _promise(self, request: Request) -> Promise:
        try:
            return request.promise or self.promises.promise(len(request.prompt), request.slo_class)
        except UnknownClass as error:
            raise RequestRefused("invalid_request", str(error), "slo") from None
