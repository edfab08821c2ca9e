"""From the group that computed a prompt to the one that generates: who moves where, which blocks when, and what becomes
of it when either side is lost.

    queued -> prefilling -> moving -> decoding
                 ^             |          |
                 +-------------+----------+   (a side is lost, or gave its blocks up: computed again from its tokens)

The schedulers hold the sequences (`scheduler.exchange`); this machine decides, and says to the workers what they are to
do: open a lease on the blocks that wait for content, send blocks, close a lease. Whoever carries that out answers by
`opened`, `sent`, `closed` or `failed`, in any order and any time later. Every block that workers may touch is under a
lease, whose number is never used again: who comes late with an old one is refused by the workers, and its blocks are
given away only once the workers have closed it, or are gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from scheduler.exchange import Place
from scheduler.orders import Close, Moved, Open, Order, Send
from scheduler.request import Finish, Phase, Sequence
from scheduler.scheduler import KV_CAPACITY, Scheduler

MOST_ATTEMPTS = 6
"""So often in a row a request's KV may fail to arrive before the request ends with the reason."""
FIRST_PAUSE_S = 0.05
"""Before the second attempt; twice as long before each further one."""


class Stage(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    MOVING = "moving"
    DECODING = "decoding"


@dataclass(slots=True)
class _Move:
    sequence: Sequence
    source: int
    target: int
    place: Place
    lease: int
    there: int
    """So many of its blocks are on the other side."""
    asked: bool = False
    """Whether the other side was told to open its lease."""
    opened: bool = False
    sending: Send | None = None
    early: bool = False
    """Whether what is being sent went while the prompt was still being computed."""
    bytes: int = 0
    early_bytes: int = 0
    send_s: float = 0.0
    begun: float = 0.0
    sends: list[tuple[float, float]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Its sequence ended, or starts over, or there is no room for it any more."""
        starts_over = self.sequence.preemptions != self.place.life
        return starts_over or self.place.given_up or self.sequence.phase not in (Phase.RUNNING, Phase.HELD)


@dataclass(slots=True)
class _Failures:
    count: int = 0
    not_before: float = 0.0


ChoosePrefill = Callable[[Sequence, Mapping[int, Scheduler]], int]
"""Which of the groups that stand computes a sequence that starts over."""


def fewest_tokens(sequence: Sequence, groups: Mapping[int, Scheduler]) -> int:
    """The one with the least left to compute."""
    return min(groups, key=lambda group: (groups[group].intake.tokens_to_compute, group))


@dataclass
class Handoffs:
    """Of the groups of one application, by number. `clock` gives seconds.

    Its schedulers have one `prefix_key` and one count of orders. After whatever may have changed something (an
    iteration, an arrival, an abort, an answer) `advance` is to be called, and then `take_orders`.
    """

    groups: Mapping[int, Scheduler]
    clock: Callable[[], float]
    choose_prefill: ChoosePrefill = fewest_tokens
    _standing: set[int] = field(init=False)
    _moves: dict[str, _Move] = field(init=False, default_factory=dict)
    _sending: dict[int, _Move] = field(init=False, default_factory=dict)
    _opening: dict[int, _Move] = field(init=False, default_factory=dict)
    _failures: dict[str, _Failures] = field(init=False, default_factory=dict)
    _orders: list[Order] = field(init=False, default_factory=list)
    _moved: list[Moved] = field(init=False, default_factory=list)
    _news: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._standing = set(self.groups)
        self._numbers = itertools.count(1)

    # What others ask.

    def advance(self) -> set[int]:
        """Do all that can be done now. Returns the groups that have something new to run."""
        for move in [move for move in self._moves.values() if move.over]:
            self._cancel(move)
        self._failures = {name: failed for name, failed in self._failures.items() if self.stage(name) is not None}
        self._start_over()
        self._find_places()
        for move in list(self._moves.values()):
            self._push(move)
        news, self._news = self._news, set()
        return news

    def take_orders(self) -> list[Order]:
        """For the workers, in this order; those of one group may be carried out side by side."""
        orders, self._orders = self._orders, []
        return orders

    def take_moved(self) -> list[Moved]:
        """What has arrived since the last call."""
        moved, self._moved = self._moved, []
        return moved

    @property
    def next_try(self) -> float | None:
        """When to `advance` even if nothing happens until then: something failed and is tried again."""
        return min((failed.not_before for failed in self._failures.values()), default=None)

    def stage(self, request_id: str) -> Stage | None:
        """Where a request is; None for one that no group knows."""
        for scheduler in self.groups.values():
            sequence = scheduler.sequence(request_id)
            if sequence is not None:
                if sequence.phase is Phase.WAITING:
                    return Stage.QUEUED
                if sequence.phase is Phase.HELD:
                    return Stage.MOVING if scheduler.exchange.role == "prefill" else Stage.QUEUED
                return Stage.PREFILLING if scheduler.exchange.role == "prefill" else Stage.DECODING
        return None

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> int | None:
        """End a request wherever it is: the group that had it, or None. Both sides are free once what is being read or
        written at this moment has been."""
        for group, scheduler in self.groups.items():
            if scheduler.abort(request_id, finish):
                return group
        return None

    # Answers of the workers.

    def opened(self, lease: int) -> None:
        move = self._opening.pop(lease, None)
        if move is not None:
            move.opened = True

    def sent(self, number: int, count: int, seconds: float) -> None:
        """An order to send was carried out: bytes and seconds of all ranks."""
        move = self._sending.pop(number, None)
        if move is None or move.sending is None:
            return
        order, move.sending = move.sending, None
        self.groups[order.group].exchange.end_lease(number)
        move.there = order.first + len(order.blocks)
        move.bytes += count
        move.send_s += seconds
        move.sends.append((move.begun, self.clock()))
        if move.early:
            move.early_bytes += count

    def closed(self, group: int, lease: int) -> None:
        self.groups[group].exchange.end_lease(lease)

    def failed(self, number: int, reason: str) -> None:
        """An `Open` or a `Send` (by its number) could not be carried out. It is tried again, from the beginning."""
        move = self._sending.get(number) or self._opening.get(number)
        if move is None:
            return
        request_id = move.sequence.request_id
        self._cancel(move)
        failures = self._failures.setdefault(request_id, _Failures())
        failures.not_before = self.clock() + FIRST_PAUSE_S * 2**failures.count
        failures.count += 1
        if failures.count >= MOST_ATTEMPTS:
            del self._failures[request_id]
            self.groups[move.source].end(request_id, Finish.ERROR, f"its KV could not be moved: {reason}")
            self._news.add(move.source)

    # Groups come and go.

    def lost(self, group: int) -> None:
        """Its workers are gone. Its scheduler has been told (`requeue_all`), or is about to be."""
        self._standing.discard(group)
        for move in list(self._moves.values()):
            if group in (move.source, move.target):
                self._cancel(move)

    def stands(self, group: int) -> None:
        """It has workers again, which know nothing."""
        self._standing.add(group)

    @property
    def standing(self) -> frozenset[int]:
        return frozenset(self._standing)

    def _with_role(self, role: str, standing: bool = True) -> dict[int, Scheduler]:
        return {
            group: scheduler
            for group, scheduler in self.groups.items()
            if scheduler.exchange.role == role and (group in self._standing or not standing)
        }

    # Its steps.

    def _start_over(self) -> None:
        """What gave its blocks up, or was on a lost group, is computed again on one that stands."""
        prefill = self._with_role("prefill")
        if not prefill:
            return
        for group, scheduler in self.groups.items():
            for sequence in self._homeless(group, scheduler):
                chosen = self.choose_prefill(sequence, prefill)
                if prefill[chosen].pool.blocks_for(sequence.length) > prefill[chosen].pool.total:
                    scheduler.end(sequence.request_id, Finish.LENGTH, KV_CAPACITY)
                    self._news.add(group)
                else:
                    scheduler.exchange.hand_over(sequence)
                    prefill[chosen].exchange.adopt(sequence)
                    self._news.add(chosen)

    def _homeless(self, group: int, scheduler: Scheduler) -> list[Sequence]:
        if scheduler.exchange.role == "decode":
            return [sequence for sequence in scheduler.exchange.held if sequence.pending == 0]
        lost = group not in self._standing
        return [sequence for sequence in scheduler.waiting if sequence.pending == 0] if lost else []

    def _find_places(self) -> None:
        """Oldest first; nobody overtakes one that finds no room."""
        decode, prefill = self._with_role("decode"), self._with_role("prefill")
        now = self.clock()
        wanting = [
            (sequence, group)
            for group, scheduler in prefill.items()
            for sequence in (*scheduler.running, *scheduler.exchange.held)
            if sequence.request_id not in self._moves and sequence.goes_on
        ]
        for sequence, source in sorted(wanting, key=lambda found: found[0].order):
            failures = self._failures.get(sequence.request_id)
            if failures is not None and failures.not_before > now:
                continue
            room = {group: s.exchange.could_reserve(sequence) for group, s in decode.items()}
            left = {group: blocks for group, blocks in room.items() if blocks is not None}
            if left:
                self._begin(sequence, source, max(left, key=lambda group: (left[group], -group)))
            elif self._fits_nowhere(sequence):
                self.groups[source].end(sequence.request_id, Finish.LENGTH, KV_CAPACITY)
                self._news.add(source)
            else:
                return

    def _fits_nowhere(self, sequence: Sequence) -> bool:
        pools = [scheduler.pool for scheduler in self._with_role("decode", standing=False).values()]
        return all(pool.blocks_for(sequence.prefill_target + 1) > pool.total for pool in pools)

    def _begin(self, sequence: Sequence, source: int, target: int) -> None:
        exchange = self.groups[target].exchange
        place = exchange.reserve(sequence)
        assert place is not None  # asked before
        lease = next(self._numbers)
        exchange.lease(lease, place.blocks)
        move = _Move(sequence, source, target, place, lease, place.shared)
        self._moves[sequence.request_id] = self._opening[lease] = move
        self.groups[source].exchange.placed.add(sequence.request_id)
        self._news.add(source)  # another prompt may begin

    def _push(self, move: _Move) -> None:
        """Send what has been computed and is not there, or end the move when everything is. Nothing comes before the
        plans of the other side that used its blocks have been answered: it would be overwritten."""
        if not move.asked and self.groups[move.target].is_past(move.place.last_use):
            move.asked = True
            self._orders.append(Open(move.target, move.lease, tuple(move.place.blocks)))
        if not move.opened or move.sending is not None:
            return
        source, sequence = self.groups[move.source], move.sequence
        held = sequence.phase is Phase.HELD
        size = source.pool.block_size
        ready = source.pool.blocks_for(sequence.computed) if held else source.written(sequence) // size
        if ready > move.there:
            self._send(move, tuple(sequence.blocks[move.there : ready]))
        elif held:
            self._complete(move)

    def _send(self, move: _Move, blocks: tuple[int, ...]) -> None:
        number = next(self._numbers)
        self.groups[move.source].exchange.lease(number, blocks)
        move.sending = Send(move.source, number, blocks, move.target, move.lease, move.there)
        move.early, move.begun = move.sequence.phase is Phase.RUNNING, self.clock()
        self._sending[number] = move
        self._orders.append(move.sending)

    def _complete(self, move: _Move) -> None:
        sequence, place = move.sequence, move.place
        del self._moves[sequence.request_id]
        self._failures.pop(sequence.request_id, None)
        shared, blocks = place.shared, self.groups[move.source].pool.blocks_for(sequence.computed)
        tokens, since = sequence.computed, sequence.last_token_at
        self.groups[move.source].exchange.hand_over(sequence)
        self.groups[move.target].exchange.settle(place)
        self._orders.append(Close(move.target, move.lease))
        wait = 0.0 if since is None else self.clock() - since
        self._moved.append(
            Moved(
                request_id=sequence.request_id,
                source=move.source,
                target=move.target,
                tokens=tokens,
                blocks_sent=max(0, blocks - shared),
                blocks_shared=min(shared, blocks),
                bytes=move.bytes,
                send_s=move.send_s,
                early_bytes=move.early_bytes,
                wait_s=wait,
                sends=tuple(move.sends),
            )
        )
        self._news |= {move.source, move.target}

    def _cancel(self, move: _Move) -> None:
        """Nothing more is sent. What workers may be reading or writing now is free when they say so."""
        self._moves.pop(move.sequence.request_id, None)
        self._opening.pop(move.lease, None)
        self.groups[move.source].exchange.placed.discard(move.sequence.request_id)
        if move.sending is not None:
            self._sending.pop(move.sending.number, None)
            self._close(move.source, move.sending.number)
        self.groups[move.target].exchange.give_up(move.place)
        self._close(move.target, move.lease)
        self._news |= {move.source, move.target}

    def _close(self, group: int, lease: int) -> None:
        """Workers that are gone touch nothing: there is nobody to ask."""
        if group in self._standing:
            self._orders.append(Close(group, lease))
        else:
            self.groups[group].exchange.end_lease(lease)
