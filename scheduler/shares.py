"""Whose promises may take the room that others need: admission by promise among several tenants.

What is promised cannot be taken back. So a tenant that has had its share lately is held to leaving room: it is let in
where every other tenant that was here lately, and has had less, could come right after it with what it asked for last,
and be let in, and twice where there can be room for that. One that asks for more than its share, and has not had it,
leaves it to those that have used less of theirs. Whoever asks for less and has had less is not asked for that, and a
tenant that is alone has everything.

A tenant's share is its part of all weights, and what it has had is counted in the seconds that its prompts take: each
newcomer occupies its part of the machine until that would be done with it (VirtualClock: Zhang, SIGCOMM 1990). Slots,
blocks and the streams that a pace leaves room for are shared by what is held of them now.

Where promises are so short that one newcomer leaves no room for another even if nobody else is there, the machine is
divided by time: those that have had their shares may come as long as all together take it every second moment.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.present import Queue, is_prompt
from scheduler.request import Request, Sequence
from scheduler.roofline import Features
from scheduler.slo import Promise

LATELY_S = 60.0
MOST_TENANTS = 256
REMEMBERED = 4
"""Requests of a tenant, for each of which room is left: they may be of several kinds."""
MOST_ASKED = 8
"""Requests of all others that room is left for: of as many tenants as there are, those that came last."""
AVERAGED_S = 10.0
"""Over which it is averaged how much a tenant asks for."""
BANKED_S = 5.0
"""So much of the time that a tenant did not use it may use later, and so much that it had more is remembered."""
EVERY_SECOND = 2.0


class Outlook(NamedTuple):
    """What a newcomer would get: whether its promise can be kept and none is broken for it; with caution seconds until
    the first of the prompts gets on, for each of their tokens, and until its own first token; and the seconds that its
    prompt probably takes."""

    kept: bool
    begins_s: float
    token_s: float
    waits_s: float
    takes_s: float


class Terms(NamedTuple):
    """By what is judged: what somebody would get there, and the seconds of an iteration of streams."""

    outlook: Callable[[Sequence, Queue], Outlook]
    predict: Callable[[Features], float]


class Crowd(NamedTuple):
    """Why somebody is not let in who would be if it were alone: seconds after which it may be, and those in which its
    tenant's part of the machine would have computed all prompts of the tenant."""

    retry_after_s: float
    part_s: float


class Asked(NamedTuple):
    """What came to be judged."""

    request: Request
    promise: Promise
    reusable: int
    at: float

    def again(self, now: float) -> Sequence:
        """If it came once more."""
        request = self.request
        arrival, tokens = now - request.age_s, list(request.prompt)
        sequence = Sequence(request=request, arrival=arrival, order=-1, tokens=tokens, promise=self.promise)
        sequence.due, sequence.reusable = sequence.wanted_at(), self.reusable
        return sequence


@dataclass(slots=True)
class Visitor:
    """A tenant that came lately. `asked`: for what, the last first. `free_at`: until then its part of the machine is
    occupied. `load`: how much of a machine it asked for at `load_at`."""

    asked: deque[Asked] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    free_at: float = -math.inf
    load: float = 0.0
    load_at: float = 0.0

    @property
    def weight(self) -> float:
        return self.asked[0].request.weight

    def banked(self, now: float) -> float:
        """Seconds of its part of the machine that it has not used, negative where it used more."""
        return min(now - self.free_at, BANKED_S)

    def asks_for(self, seconds: float, now: float) -> None:
        self.load, self.load_at = self.load_until(now) + seconds / AVERAGED_S, now

    def load_until(self, now: float) -> float:
        return self.load * math.exp((self.load_at - now) / AVERAGED_S)


class Shares:
    """Of one gate, by the tenants that came to it."""

    def __init__(self) -> None:
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._free_at = -math.inf
        """Until then all together have taken the machine every second moment."""

    def came(self, newcomer: Sequence, outlook: Outlook, now: float) -> bool:
        """Whoever comes is noted, whatever becomes of it. Whether others came lately."""
        name = newcomer.request.tenant
        visitor = self._visitors.setdefault(name, Visitor())
        visitor.asked.appendleft(Asked(newcomer.request, newcomer.promise, newcomer.reusable, now))
        visitor.asks_for(outlook.takes_s, now)
        self._visitors.move_to_end(name)
        while len(self._visitors) > MOST_TENANTS or next(iter(self._visitors.values())).asked[0].at < now - LATELY_S:
            self._visitors.popitem(last=False)
        return len(self._visitors) > 1

    def crowd(self, newcomer: Sequence, outlook: Outlook, queue: Queue, terms: Terms, now: float) -> Crowd | None:
        """None where it is let in, as far as other tenants are concerned. One that is not `kept` is told what its part
        of the machine would do for it."""
        if not outlook.kept:
            return self._crowd(newcomer, outlook, queue, 0.0)
        entitled = self._has_part_left(newcomer, queue, terms, now)
        if entitled and not self._asks_for_more(newcomer, now):
            return None
        if not entitled and self._has_no_time(newcomer, outlook, queue, now):
            return self._crowd(newcomer, outlook, queue, 0.0)
        others = self._others(newcomer, entitled, queue, terms, now)
        wanting, never = self._without_room(newcomer, others, queue, terms)
        if wanting:
            return self._crowd(newcomer, outlook, queue, 0.0)
        if never and not entitled and self._free_at > now:
            return self._crowd(newcomer, outlook, queue, self._free_at - now)
        return None

    def let_in(self, newcomer: Sequence, outlook: Outlook, now: float) -> None:
        """It occupies its part of the machine."""
        visitor = self._visitors[newcomer.request.tenant]
        visitor.free_at = _later(visitor.free_at, self._times(newcomer) * outlook.takes_s, now)
        self._free_at = _later(self._free_at, EVERY_SECOND * outlook.takes_s, now)

    def _times(self, newcomer: Sequence) -> float:
        """So many times the part of its tenant is the machine."""
        return sum([visitor.weight for visitor in self._visitors.values()]) / newcomer.request.weight

    def _crowd(self, newcomer: Sequence, outlook: Outlook, queue: Queue, retry_after_s: float) -> Crowd:
        tokens = newcomer.length - newcomer.reusable + _tokens_of(newcomer.request.tenant, queue)
        return Crowd(retry_after_s, outlook.begins_s + self._times(newcomer) * tokens * outlook.token_s)

    def _has_part_left(self, newcomer: Sequence, queue: Queue, terms: Terms, now: float) -> bool:
        """Whether its tenant's part of the machine is free, and has a slot, blocks and the pace for it. A single one
        fits anywhere."""
        name, times = newcomer.request.tenant, self._times(newcomer)
        if self._visitors[name].banked(now) < 0:
            return False
        own = [sequence for sequence in (*queue.running, *(queue.elsewhere or ())) if sequence.request.tenant == name]
        if not own:
            return True
        count, length = len(own) + 1, newcomer.length + sum([sequence.length for sequence in own])
        blocks = queue.blocks_for(newcomer.length) + sum([len(sequence.blocks) for sequence in own])
        if queue.elsewhere is None and (count * times > queue.slots or blocks * times > queue.blocks):
            return False
        as_many = Features(0, math.ceil(count * times), math.ceil(length * times))
        return terms.predict(as_many) <= newcomer.promise.tpot_s

    def _asks_for_more(self, newcomer: Sequence, now: float) -> bool:
        """Than its tenant's part of the machine, whatever it has had."""
        return self._visitors[newcomer.request.tenant].load_until(now) * self._times(newcomer) > 1

    def _has_no_time(self, newcomer: Sequence, outlook: Outlook, queue: Queue, now: float) -> bool:
        """Whether it would be late, behind the prompts that are there, if the others went on asking for as much as they
        do, as far as they have shares."""
        if not queue.present.tokens_to_compute:
            return False
        others = [visitor for name, visitor in self._visitors.items() if name != newcomer.request.tenant]
        weights = newcomer.request.weight + sum([visitor.weight for visitor in others])
        theirs = sum([min(visitor.load_until(now), visitor.weight / weights) for visitor in others])
        return outlook.waits_s > (1 - theirs) * (newcomer.promise.ttft_s - newcomer.request.age_s)

    def _without_room(
        self, newcomer: Sequence, others: list[Sequence], queue: Queue, terms: Terms
    ) -> tuple[bool, bool]:
        """Whether another tenant would not find room beside the newcomer, and would if nobody else were there; and
        whether one would not even then, though alone it would."""
        never, nobody = False, queue.emptied()
        for other in others:
            if _leaves_room(newcomer, other, queue, terms) or not terms.outlook(other, nobody).kept:
                continue
            if _leaves_room(newcomer, other, nobody, terms):
                return True, never
            never = True
        return False, never

    def _others(self, newcomer: Sequence, entitled: bool, queue: Queue, terms: Terms, now: float) -> list[Sequence]:
        """As they would come again, those that have something left of their parts: more of it than the newcomer, where
        it is `entitled` to what it asks for itself."""
        own = self._visitors[newcomer.request.tenant]
        others = [visitor for visitor in reversed(self._visitors.values()) if visitor is not own]
        if entitled:
            others = [visitor for visitor in others if visitor.banked(now) > own.banked(now)]
        asked = [visitor.asked[n] for n in range(REMEMBERED) for visitor in others if n < len(visitor.asked)]
        again = [last.again(now) for last in asked[:MOST_ASKED]]
        return [other for other in again if self._has_part_left(other, queue, terms, now)]


def _tokens_of(tenant: str, queue: Queue) -> int:
    """That are to be computed of its prompts."""
    running = [s.length - s.computed for s in queue.running if s.request.tenant == tenant and is_prompt(s)]
    return sum(running) + sum([s.length - s.reusable for s in queue.waiting if s.request.tenant == tenant])


def _later(free_at: float, seconds: float, now: float) -> float:
    return min(max(free_at, now - BANKED_S) + seconds, now + BANKED_S)


def _leaves_room(newcomer: Sequence, other: Sequence, queue: Queue, terms: Terms) -> bool:
    """Whether the other could come right after the newcomer, and also once all that is there generates; and once more
    where an empty machine has room for both: forecasts drift, and what is left to the last second is gone in the next.
    """
    beside = queue.joined_by(newcomer)
    if not (terms.outlook(other, beside).kept and terms.outlook(other, beside.generating()).kept):
        return False
    twice = queue.emptied().joined_by(newcomer).joined_by(other)
    return not terms.outlook(other, twice).kept or terms.outlook(other, beside.joined_by(other)).kept
