"""The groups of a separated engine: handoffs between their schedulers, carried out by their ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from cluster.engine import EngineUnavailable
from cluster.kv_carrier import Carrier, RankGroup
from cluster.loop import IterationLoop
from cluster.rebuild import LastingGroup
from cluster.recovery import WorkersLost
from cluster.routing import choose_again
from cluster.transfers import Transfers
from scheduler.handoff import Handoffs
from scheduler.plan import IterationPlan, IterationResult
from scheduler.request import Finish
from scheduler.request import Sequence as Running


class Separation:
    """`pump` is to be called after whatever may have changed something; it returns at once."""

    def __init__(
        self,
        loops: Sequence[IterationLoop],
        groups: Sequence[RankGroup],
        clock: Callable[[], float],
        transfers: Transfers,
    ) -> None:
        self._loops = dict(enumerate(loops))
        self._transfers = transfers
        self._clock = clock
        schedulers = {number: loop.scheduler for number, loop in self._loops.items()}
        self.handoffs = Handoffs(schedulers, clock, lambda sequence, of: choose_again(sequence, of, clock()))
        self.carrier = Carrier(dict(enumerate(groups)), self.handoffs, self.pump, self._look_at)
        for scheduler in schedulers.values():
            if scheduler.exchange.role == "prefill":
                scheduler.intake.streams_elsewhere = self._streams
        self._looking: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._again = False

    async def link_all(self) -> None:
        roles = {number: loop.scheduler.exchange.role for number, loop in self._loops.items()}
        prefill = [number for number, role in roles.items() if role == "prefill"]
        decode = [number for number, role in roles.items() if role == "decode"]
        await self.carrier.link_all([(source, target) for source in prefill for target in decode])

    def pump(self) -> None:
        """Whatever can be done now is begun. An answer that comes in the middle of it is looked at right after."""
        self._again = True
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._again:
                self._again = False
                for number in self.handoffs.advance():
                    self._loops[number].wake()
                for order in self.handoffs.take_orders():
                    self.carrier.carry(order)
                for moved in self.handoffs.take_moved():
                    self._transfers.add(moved)
        finally:
            self._pumping = False
        self._come_back()

    def abort(self, request_id: str, finish: Finish) -> None:
        """Wherever it is; both sides are free as soon as their ranks have heard of it."""
        number = self.handoffs.abort(request_id, finish)
        if number is not None:
            self._loops[number].wake()
            self.pump()

    def lost(self, number: int) -> None:
        self.handoffs.lost(number)
        self.carrier.forget(number)
        self.pump()

    def stands(self, number: int) -> None:
        self.handoffs.stands(number)
        self.pump()

    def given_up(self, number: int, reason: str) -> None:
        """There will be no workers of it any more. Where that was the last group of its role, nothing can go on."""
        role = self._loops[number].scheduler.exchange.role
        others = [
            other
            for other, loop in self._loops.items()
            if other != number and loop.failure is None and loop.scheduler.exchange.role == role
        ]
        if not others:
            for loop in self._loops.values():
                loop.scheduler.end_all(reason)
                loop.wake()
        self.pump()

    def figures(self) -> dict[str, float]:
        """Of transfers, since the beginning."""
        return self._transfers.figures()

    def _streams(self) -> tuple[Running, ...]:
        """Those of the decode group that carries the fewest."""
        decode = [s for s in self.handoffs.groups.values() if s.exchange.role == "decode"]
        return min((scheduler.running for scheduler in decode), key=len)

    def _look_at(self, number: int) -> None:
        """Give it something to compute: a group that hangs is noticed by an iteration that does not come."""
        if number not in self._looking:
            task = asyncio.create_task(self._beat(number))
            self._looking[number] = task
            task.add_done_callback(lambda _: self._looking.pop(number, None))

    async def _beat(self, number: int) -> None:
        with suppress(EngineUnavailable):
            await self._loops[number].heartbeat()

    def close(self) -> None:
        self.carrier.close()
        for task in list(self._looking.values()):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _come_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.handoffs.next_try
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.01, at - self._clock()), self.pump)


class SeparatedGroup:
    """A lasting group whose losses and returns are told to the separation: what was on its way begins anew."""

    def __init__(self, group: LastingGroup, number: int, separation: Callable[[], Separation | None]) -> None:
        self._group, self._number, self._separation = group, number, separation

    async def execute(self, plan: IterationPlan) -> IterationResult:
        return await self._group.execute(plan)

    async def close(self) -> None:
        await self._group.close()

    def patience(self, predicted_s: float | None) -> float:
        return self._group.patience(predicted_s)

    def watch(self, wake: Callable[[], None]) -> None:
        self._group.watch(wake)

    def dead(self) -> WorkersLost | None:
        return self._group.dead()

    async def replace(self, lost: WorkersLost) -> SeparatedGroup:
        """Raises WorkersLost where there will be no workers any more."""
        separation = self._separation()
        assert separation is not None  # made before any loop runs
        separation.lost(self._number)
        try:
            await self._group.replace(lost)
        except WorkersLost as final:
            separation.given_up(self._number, f"the workers failed: {final}")
            raise
        separation.stands(self._number)
        return self
