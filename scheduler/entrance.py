"""Who of those that wait is given a slot and KV blocks next.

As they came, tenants by turns; or, where the policy says what is urgent, by deadlines. Then those that can be in time
go first, tenants take turns among them, and of a tenant's the first to be due is next. Nobody holds a slot who would
not be computed soon: as long as the prompts that hold one and go first are more than an iteration computes, no other
enters. So what can wait stands in nobody's way, and where it does, because it entered while nothing else was there, it
makes room. In time everybody enters: one in `PATIENCE` tokens is for those that were passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scheduler.deadlines import Work, givable
from scheduler.exchange import Exchange
from scheduler.line import FairLine, Line, Tenant
from scheduler.request import Phase, Sequence
from scheduler.residents import Residents, settled

PATIENCE = 32
"""When so many times its tokens have been let in while it was its tenant's oldest, a sequence is next."""


class Urgency(NamedTuple):
    """By what a policy goes: about how many prompt tokens the next iterations have room for, and how long the rest of a
    prompt takes."""

    reach: int
    work: Work


class Entrance:
    """Of one scheduler, into whose lines it looks. `give_way` takes slot and blocks away from one that has them."""

    __slots__ = ("_by_turns", "_exchange", "_give_way", "_prompts", "_residents", "_tenants", "_urgency", "waiting")

    def __init__(
        self, waiting: Line, residents: Residents, exchange: Exchange, give_way: Callable[[Sequence], None]
    ) -> None:
        self.waiting = waiting
        self._tenants = waiting.tenants if isinstance(waiting, FairLine) else None
        self._residents = residents
        self._exchange = exchange
        self._give_way = give_way
        self._prompts: list[Sequence] = []
        self._urgency: Urgency | None = None
        self._by_turns = True

    def let_in(self, urgency: Urgency | None, now: float, iteration: int, by_turns: bool = True) -> None:
        """Everybody who is next, until one does not fit: nobody overtakes that one, so that none starves. Not
        `by_turns`: what tenants have was seen to when they were promised it, and deadlines alone decide."""
        self._by_turns = by_turns
        self._review(urgency, now)
        made_room = False
        while (sequence := self._next()) is not None and sequence.pending == 0:
            if self._residents.enter(sequence):
                self.waiting.enter(sequence)
                self._prompts.append(sequence)
                sequence.phase, sequence.chunk_at = Phase.RUNNING, iteration
            elif made_room or not (leaving := self._in_the_way_of(sequence)):
                return
            else:
                made_room = True
                for other in leaving:
                    self._give_way(other)

    def _review(self, urgency: Urgency | None, now: float) -> None:
        """Before anybody is let in: who is in time, by what the policy knows now."""
        tenants = self._tenants
        self._urgency = None if tenants is None else urgency
        if tenants is None or urgency is None:
            return
        self._prompts = list(self._residents.line.prompts)
        weights = sum([tenant.weight for tenant in tenants.values()])
        for name, tenant in tenants.items():
            own = [s for s in self._prompts if s.request.tenant == name] if len(tenants) > 1 else self._prompts
            slower = weights / tenant.weight if self._by_turns else 1.0
            tenant.deadlines.review(own, _slower(urgency.work, slower), now)

    def _next(self) -> Sequence | None:
        """None where nobody waits, or nobody needs to be let in yet."""
        if not self.waiting:
            return None
        if not self._exchange.takes_prompts:
            return next((sequence for sequence in self.waiting.in_turn() if not sequence.goes_on), None)
        if self._urgency is None or self._tenants is None:
            return self.waiting.first()
        sequence, aged = min(map(self._next_of, self._tenants.values()))[-2:]
        if not aged and self._ahead_of(sequence) >= self._urgency.reach:
            return None
        return sequence

    def _next_of(self, tenant: Tenant) -> tuple[bool, float, float, int, Sequence, bool]:
        """Who takes the tenant's turn, after what it is compared with others by."""
        deadlines, oldest = tenant.deadlines, tenant.line[0]
        aged = self.waiting.let_in - deadlines.passed_from >= PATIENCE * oldest.length
        sequence = oldest if aged else (deadlines.timely or deadlines.yielding)[0][2]
        late = sequence.yields and not aged
        turn = tenant.turn_of(sequence) if self._by_turns else 0.0
        return late, turn, sequence.due, sequence.order, sequence, aged

    def _ahead_of(self, sequence: Sequence) -> int:
        """Tokens left of prompts with a slot that are computed before it."""
        place = _place(sequence)
        return sum([s.prefill_target - s.computed for s in self._prompts if _place(s) < place])

    def _in_the_way_of(self, sequence: Sequence) -> list[Sequence]:
        """Prompts that are to give slot and blocks to one that does not fit, the last to be computed first. None where
        even that would not do."""
        if self._urgency is None or sequence.yields:
            return []
        slots, blocks = self._residents.missing_for(sequence)
        leaving = []
        for other in sorted(self._prompts, key=_place, reverse=True):
            if other.phase is Phase.RUNNING and makes_way(other, sequence):
                leaving.append(other)
                slots, blocks = slots - 1, blocks - len(other.blocks) - 1
                if slots <= 0 and blocks <= 0:
                    return leaving
        return []


def _slower(work: Work, times: float) -> Work:
    """Among several tenants that wait, each has only its part of the machine."""
    return work if times == 1 else lambda sequence: times * work(sequence)


def _place(sequence: Sequence) -> tuple[bool, float, int]:
    return sequence.yields, sequence.due, sequence.order


def makes_way(prompt: Sequence, sequence: Sequence) -> bool:
    """Whether a prompt with a slot gives it up for a sequence that can be in time: it cannot itself, or was promised
    more time. The latter among a tenant's own: what runs is not taken away for another tenant."""
    if settled(prompt) or not givable(prompt) or sequence.yields:
        return False
    longer = prompt.due > sequence.due and prompt.promise.ttft_s > sequence.promise.ttft_s
    return prompt.yields or (longer and prompt.request.tenant == sequence.request.tenant)
