"""Groups that prefill and groups that decode over strict bookkeeping workers, with transfers carried out by hand: any
order at any time, what is read copied first and written later, as a network does."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from scheduler.exchange import Role
from scheduler.handoff import Handoffs
from scheduler.orders import Close, Moved, Open, Send
from scheduler.plan import IterationPlan
from scheduler.policies import make_policy
from scheduler.request import Delta, Finish, Request, TokenLogprob
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.world import StrictWorker


@dataclass
class Side:
    """A group: its scheduler, its worker, plans under way, and what its ranks know of leases."""

    scheduler: Scheduler
    worker: StrictWorker
    under_way: deque[IterationPlan] = field(default_factory=deque)
    open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def referenced(self, blocks: tuple[int, ...]) -> bool:
        return all(block in self.scheduler.pool._references for block in blocks)


@dataclass
class Parcel:
    """Content of blocks between two groups."""

    send: Send
    content: list[list[int]]


class World:
    def __init__(self, config: SchedulerConfig, roles: list[Role], chunk_size: int, overlap: int = 1) -> None:
        orders = itertools.count()
        self.overlap = overlap
        self.now = 0.0
        self.sides = [self._side(config, role, chunk_size, orders) for role in roles]
        self.handoffs = Handoffs({i: side.scheduler for i, side in enumerate(self.sides)}, lambda: self.now)
        self.orders: list[Open | Send | Close] = []
        self.parcels: list[Parcel] = []
        self.requests: dict[str, Request] = {}
        self.got: dict[str, list[int]] = {}
        self.scores: dict[str, list[TokenLogprob]] = {}
        self.ended: dict[str, Delta] = {}
        self.moved: list[Moved] = []
        self.sent_blocks = 0

    @staticmethod
    def _side(config: SchedulerConfig, role: Role, chunk_size: int, orders: itertools.count[int]) -> Side:
        policy = make_policy("chunked", chunk_size=chunk_size)
        if role == "prefill":
            config = replace(config, swap_blocks=0)
        scheduler = Scheduler(config, policy, b"one key", role=role, orders=orders)
        return Side(scheduler, StrictWorker(config.block_size, config.num_blocks, config.max_running))

    # What happens.

    def add(self, request: Request, group: int) -> None:
        self.sides[group].scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        self.got[request.request_id] = []
        self.settle()

    def schedule(self, group: int) -> bool:
        """Plan one iteration, where the group stands and fewer than `overlap` are under way."""
        side = self.sides[group]
        if group not in self.handoffs.standing or len(side.under_way) >= self.overlap:
            return False
        plan = side.scheduler.schedule(self.now)
        self.settle()
        if plan is None:
            return False
        side.under_way.append(plan)
        return True

    def commit(self, group: int) -> bool:
        """The oldest plan under way is carried out."""
        side = self.sides[group]
        if not side.under_way:
            return False
        self.now += 1.0
        result = side.worker.execute(side.under_way.popleft())
        self._take(side.scheduler.commit(result, self.now))
        self.settle()
        return True

    def carry_out(self, index: int) -> None:
        """One of the orders that wait."""
        order = self.orders.pop(index)
        if order.group not in self.handoffs.standing:
            self.handoffs.failed(order.number if isinstance(order, Send) else order.lease, "it is gone")
        elif isinstance(order, Open):
            self._open(order)
        elif isinstance(order, Close):
            self._close(order)
        else:
            self._read(order)
        self.settle()

    def deliver(self, index: int) -> None:
        """One of the parcels arrives."""
        parcel = self.parcels.pop(index)
        send, target = parcel.send, self.sides[parcel.send.target]
        blocks = target.open.get(send.lease)
        if send.target not in self.handoffs.standing or blocks is None:
            self.handoffs.failed(send.number, "stale lease")
        else:
            places = blocks[send.first : send.first + len(send.blocks)]
            assert len(places) == len(send.blocks)
            assert target.referenced(places), "a block was written after it had been freed"
            for place, content in zip(places, parcel.content, strict=True):
                target.worker.kv[place] = list(content)
            self.sent_blocks += len(places)
            self.handoffs.sent(send.number, 10 * len(places), 0.5)
        self.settle()

    def drop(self, index: int) -> None:
        """One of the parcels gets lost, and its sender is told."""
        self.handoffs.failed(self.parcels.pop(index).send.number, "connection reset")
        self.settle()

    def abort(self, request_id: str) -> None:
        self.handoffs.abort(request_id)
        self.settle()

    def lose(self, group: int, told_first: bool) -> None:
        side = self.sides[group]
        side.worker.replace()
        side.open.clear()
        side.under_way.clear()
        self.parcels = [parcel for parcel in self.parcels if parcel.send.group != group]
        side.worker.last_iteration = side.scheduler.stats()["iterations"]
        if told_first:
            self.handoffs.lost(group)
            side.scheduler.requeue_all()
        else:
            side.scheduler.requeue_all()
            self.settle()
            self.handoffs.lost(group)
        self.settle()

    def rebuild(self, group: int) -> None:
        if group in self.handoffs.standing:
            return
        self.orders = [order for order in self.orders if order.group != group]
        self.handoffs.stands(group)
        self.settle()

    # In between.

    def settle(self) -> None:
        self.handoffs.advance()
        self.orders += self.handoffs.take_orders()
        self.moved += self.handoffs.take_moved()
        for side in self.sides:
            self._take(side.scheduler.take_deltas())

    def check(self) -> None:
        for side in self.sides:
            side.scheduler.check()
        for name in self.requests:
            homes = [side for side in self.sides if side.scheduler.sequence(name) is not None]
            assert len(homes) == (name not in self.ended), "a request is with one scheduler until it ends"
            assert (self.handoffs.stage(name) is None) == (name in self.ended)
        for side in self.sides:
            if side.scheduler.exchange.role == "decode":
                waiting = side.scheduler.waiting
                assert all(each.kept for each in waiting), "nothing waits to be computed where nothing is"

    def round(self) -> bool:
        """Everything that can happen, once. Whether anything did."""
        before = (len(self.ended), sum(map(len, self.got.values())))
        happened = False
        for group in range(len(self.sides)):
            happened |= self.schedule(group)
            happened |= self.commit(group)
        while self.orders or self.parcels:
            happened = True
            if self.orders:
                self.carry_out(0)
            if self.parcels:
                self.deliver(0)
        if not happened and self.handoffs.next_try is not None:
            self.now, happened = max(self.now, self.handoffs.next_try), True
            self.settle()
        self.check()
        return happened or before != (len(self.ended), sum(map(len, self.got.values())))

    def drain(self) -> None:
        for group in range(len(self.sides)):
            if group not in self.handoffs.standing:
                self.rebuild(group)
        for _ in range(20_000):
            if len(self.ended) == len(self.requests) and not self.orders and not self.parcels:
                return
            assert self.round(), f"stuck: {[self.handoffs.stage(name) for name in self.requests]}"
        raise AssertionError("not done")

    @property
    def all_free(self) -> bool:
        return all(side.scheduler.pool.available == side.scheduler.pool.total for side in self.sides)

    # The workers' side of transfers.

    def _open(self, order: Open) -> None:
        side = self.sides[order.group]
        assert order.lease not in side.closed, (
            "no lease is opened after it was closed: the orders of a group keep order"
        )
        assert side.referenced(order.blocks)
        side.open[order.lease] = order.blocks
        self.handoffs.opened(order.lease)

    def _close(self, order: Close) -> None:
        side = self.sides[order.group]
        side.open.pop(order.lease, None)
        side.closed.add(order.lease)
        self.handoffs.closed(order.group, order.lease)

    def _read(self, send: Send) -> None:
        side = self.sides[send.group]
        if send.number in side.closed:
            self.handoffs.failed(send.number, "stale lease")
            return
        assert side.referenced(send.blocks), "a block was read after it had been freed"
        self.parcels.append(Parcel(send, [list(side.worker.kv[block]) for block in send.blocks]))

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended, "nothing follows the end of a request"
            assert not (delta.prompt_logprobs and self.got[delta.request_id]), "a prompt's log-probabilities come first"
            self.scores.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            self.got[delta.request_id].extend(delta.tokens)
            if delta.finish is not None:
                self.ended[delta.request_id] = delta


def aborted(delta: Delta) -> bool:
    return delta.finish is Finish.ABORT
