"""Whose promises may take the room that others need: admission by promise among several tenants.

What is promised cannot be taken back. So a tenant that has more than its share is held to leaving room: it is let in
where any other tenant that was here lately, and has less, could come right after it with what it asked for last, and be
let in. Whoever is within its share is not asked for that. A tenant's share is what a machine as slow as its part of
all weights would keep: if everybody's promises are kept by that, all of them together are kept by the whole one, in the
order of their deadlines (the demand of tasks with deadlines adds up: Baruah, Mok, Rosier, RTSS 1990). A tenant that is
alone has everything.

Where promises are so short that one newcomer cannot leave room for another even if nobody else is there, the machine is
divided by time: each tenant may come as often as its part of the machine would be done with what it asks for (Zhang's
VirtualClock, SIGCOMM 1990), and those that want more may have the machine every second moment.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.present import Queue, is_prompt
from scheduler.request import Request, Sequence
from scheduler.roofline import Features
from scheduler.slo import Promise

LATELY_S = 30.0
MOST_TENANTS = 256
MOST_ASKED = 8
"""Tenants that room is left for: those that came last."""
EVERY_SECOND = 2.0


class Outlook(NamedTuple):
    """What a newcomer would get: whether its promise can be kept and none is broken for it, seconds until the first of
    the prompts gets on, and for each of their tokens."""

    kept: bool
    begins_s: float
    token_s: float


class Terms(NamedTuple):
    """By what is judged: what somebody would get there, and the seconds of an iteration of streams."""

    outlook: Callable[[Sequence, Queue], Outlook]
    predict: Callable[[Features], float]


@dataclass(slots=True)
class Tenant:
    """What it asked for last, and when. `free_at`: until then it has had its part of the machine."""

    request: Request
    promise: Promise
    reusable: int
    seen_at: float
    free_at: float

    def again(self, now: float) -> Sequence:
        """If it asked for the same once more."""
        request = self.request
        arrival, tokens = now - request.age_s, list(request.prompt)
        sequence = Sequence(request=request, arrival=arrival, order=-1, tokens=tokens, promise=self.promise)
        sequence.due, sequence.reusable = sequence.wanted_at(), self.reusable
        return sequence


class Crowd(NamedTuple):
    """Why somebody is not let in who would be if it were alone: seconds after which it may be, and those in which its
    part of the machine would be done with what its tenant has here."""

    retry_after_s: float
    own_s: float


class Shares:
    """Of one gate, by the tenants that came to it."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._free_at = -math.inf

    def came(self, newcomer: Sequence, now: float) -> bool:
        """Whoever comes is noted, whatever becomes of it. Whether others came lately."""
        name, known = newcomer.request.tenant, self._tenants.pop(newcomer.request.tenant, None)
        free_at = -math.inf if known is None else known.free_at
        self._tenants[name] = Tenant(newcomer.request, newcomer.promise, newcomer.reusable, now, free_at)
        while len(self._tenants) > MOST_TENANTS or next(iter(self._tenants.values())).seen_at < now - LATELY_S:
            self._tenants.popitem(last=False)
        return len(self._tenants) > 1

    def crowd(self, newcomer: Sequence, outlook: Outlook, queue: Queue, terms: Terms, now: float) -> Crowd | None:
        """None where it is let in, as far as other tenants are concerned."""
        tenant = self._tenants[newcomer.request.tenant]
        part = self._part_of(newcomer, queue)
        if part.holds(newcomer, terms.predict) and part.keeps(newcomer, outlook, now):
            return None
        wanting, divided = self._without_room(newcomer, queue, terms, now)
        if not wanting and not divided:
            return None
        own_turn = tenant.free_at <= now and not part.prompts and part.holds(newcomer, terms.predict)
        if own_turn or (not wanting and self._free_at <= now):
            seconds = outlook.begins_s + part.own_tokens(newcomer) * outlook.token_s
            tenant.free_at, self._free_at = now + part.times * seconds, now + EVERY_SECOND * seconds
            return None
        wait = 0.0 if wanting else min(tenant.free_at, self._free_at) - now
        return Crowd(wait, outlook.begins_s + part.times * part.tokens(newcomer) * outlook.token_s)

    def _part_of(self, newcomer: Sequence, queue: Queue) -> Part:
        weights = sum([tenant.request.weight for tenant in self._tenants.values()])
        return Part.of(newcomer, queue, weights / newcomer.request.weight)

    def _without_room(self, newcomer: Sequence, queue: Queue, terms: Terms, now: float) -> tuple[bool, bool]:
        """Whether another tenant would not find room beside the newcomer, and would if nobody else were there; and
        whether one would not even then, though alone it would."""
        divided, nobody = False, queue.emptied()
        for other in self._others(newcomer, queue, terms, now):
            if _leaves_room(newcomer, other, queue, terms) or not terms.outlook(other, nobody).kept:
                continue
            if _leaves_room(newcomer, other, nobody, terms):
                return True, divided
            divided = True
        return False, divided

    def _others(self, newcomer: Sequence, queue: Queue, terms: Terms, now: float) -> list[Sequence]:
        """As they would come again: those that are within their shares."""
        found = []
        for name in [name for name in reversed(self._tenants) if name != newcomer.request.tenant][:MOST_ASKED]:
            tenant = self._tenants[name]
            again = tenant.again(now)
            part = self._part_of(again, queue)
            if not part.holds(again, terms.predict):
                continue
            if (not part.prompts and tenant.free_at <= now) or part.keeps(again, terms.outlook(again, queue), now):
                found.append(again)
        return found


class Part(NamedTuple):
    """Of a machine that is so many `times` as large, what is one tenant's: how much of it the tenant has."""

    times: float
    queue: Queue
    prompts: Seq[tuple[float, int]]
    streams: Seq[Sequence]
    """All that hold a slot, and those that generate elsewhere."""

    @classmethod
    def of(cls, newcomer: Sequence, queue: Queue, times: float) -> Part:
        name = newcomer.request.tenant
        running = [sequence for sequence in queue.running if sequence.request.tenant == name]
        waiting = [sequence for sequence in queue.waiting if sequence.request.tenant == name]
        left = [(s, s.length - s.computed) for s in running if is_prompt(s)]
        left += [(s, s.length - s.reusable) for s in waiting]
        generating = [s for s in queue.elsewhere or () if s.request.tenant == name]
        return cls(times, queue, [(s.due, tokens) for s, tokens in left], [*running, *generating])

    def own_tokens(self, newcomer: Sequence) -> int:
        return newcomer.length - newcomer.reusable

    def tokens(self, newcomer: Sequence) -> int:
        """Of prompts, with the newcomer's."""
        return self.own_tokens(newcomer) + sum([tokens for _, tokens in self.prompts])

    def holds(self, newcomer: Sequence, predict: Callable[[Features], float]) -> bool:
        """Whether the part has a slot, blocks and the pace for one more. A single one fits anywhere."""
        if not self.streams:
            return True
        count, times, queue = len(self.streams) + 1, self.times, self.queue
        length = newcomer.length + sum([sequence.length for sequence in self.streams])
        blocks = queue.blocks_for(newcomer.length) + sum([len(sequence.blocks) for sequence in self.streams])
        if queue.elsewhere is None and (count * times > queue.slots or blocks * times > queue.blocks):
            return False
        as_many = Features(0, math.ceil(count * times), math.ceil(length * times))
        return predict(as_many) <= newcomer.promise.tpot_s

    def keeps(self, newcomer: Sequence, outlook: Outlook, now: float) -> bool:
        """Whether the part would keep the newcomer's promise, and those of its tenant's that are due after it."""
        ends = now + outlook.begins_s
        for due, tokens in sorted([*self.prompts, (newcomer.due, self.own_tokens(newcomer))]):
            ends += self.times * tokens * outlook.token_s
            if newcomer.due <= due < ends:
                return False
        return True


def _leaves_room(newcomer: Sequence, other: Sequence, queue: Queue, terms: Terms) -> bool:
    """Whether the other could come right after the newcomer, and also once all that is there generates."""
    beside = queue.joined_by(newcomer)
    return terms.outlook(other, beside).kept and terms.outlook(other, beside.generating()).kept
