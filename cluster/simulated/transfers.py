"""KV that moves between simulated groups: what the state machine orders, in the time that the link takes for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from cluster.loop import IterationLoop
from cluster.simulated.machine import Link
from scheduler.handoff import Handoffs
from scheduler.orders import Close, Moved, Open, Send


class SimulatedTransfers:
    """`loops` by group. A group's side of the link carries one transfer after another, in either direction; opening and
    closing a lease take no time. Nothing fails."""

    def __init__(self, loops: Mapping[int, IterationLoop], link: Link, clock: asyncio.AbstractEventLoop) -> None:
        self._loops, self._link, self._clock = loops, link, clock
        self._handoffs = Handoffs({group: loop.scheduler for group, loop in loops.items()}, self._clock.time)
        self._free_at = dict.fromkeys(loops, 0.0)
        self._again = False
        self.moved: list[Moved] = []

    def advance(self) -> None:
        """To be called after whatever may have changed something. Runs once for all that changed at this moment."""
        if not self._again:
            self._again = True
            self._clock.call_soon(self._advance)

    def _advance(self) -> None:
        self._again = False
        for group in self._handoffs.advance():
            self._loops[group].wake()
        self.moved += self._handoffs.take_moved()
        orders = self._handoffs.take_orders()
        for order in orders:
            self._carry_out(order)
        if orders:
            self.advance()

    def _carry_out(self, order: Open | Send | Close) -> None:
        if isinstance(order, Open):
            self._handoffs.opened(order.lease)
        elif isinstance(order, Close):
            self._handoffs.closed(order.group, order.lease)
        else:
            self._send(order)

    def _send(self, order: Send) -> None:
        sides = (order.group, order.target)
        takes = self._link.seconds(len(order.blocks))
        ends = max(self._clock.time(), *(self._free_at[side] for side in sides)) + takes
        self._free_at.update(dict.fromkeys(sides, ends))
        self._clock.call_at(ends, self._sent, order.number, round(len(order.blocks) * self._link.block_bytes), takes)

    def _sent(self, number: int, count: int, seconds: float) -> None:
        self._handoffs.sent(number, count, seconds)
        self.advance()
