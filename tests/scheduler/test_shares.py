"""Admission by promise among tenants, in a world of virtual time: who floods has no part of what others need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.costmodel import OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.gate import Gate, OnInfeasible
from scheduler.policies.slo import SloBudget, SloPolicy, SloSettings
from scheduler.request import Request, Sequence
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler
from scheduler.shares import LATELY_S, Shares
from scheduler.slo import Promise
from scheduler.solver import Solver
from tests.scheduler.virtual import CONFIG, COST, VirtualRun, prompt


@dataclass(frozen=True)
class Load:
    """Of one tenant: requests at random, so many a second on the average."""

    tenant: str
    per_s: float
    lengths: tuple[int, ...] = (100,)
    outputs: int = 10
    promise: Promise | None = None
    """None: twice what the prompt takes, as a server derives it, and a pace."""
    weight: float = 1.0

    def arrivals(self, seed: int, until: float) -> Iterator[tuple[float, str, Request]]:
        source = random.Random(f"{seed}/{self.tenant}")
        at, number = source.expovariate(self.per_s), 0
        while at < until:
            length, outputs = source.choice(self.lengths), source.randint(1, 2 * self.outputs - 1)
            promise = self.promise or Promise(2 * COST.predict(Features().with_chunk(0, length)), 0.4)
            name = f"{self.tenant}-{number}"
            request = Request(
                name, prompt(length), outputs, promise=promise, tenant=self.tenant, weight=self.weight
            )
            yield at, name, request
            at, number = at + source.expovariate(self.per_s), number + 1


@dataclass
class Served:
    run: VirtualRun
    came: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, list[Request]] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)
    promised: dict[str, Promise] = field(default_factory=dict)

    def share(self, tenant: str) -> float:
        """Of its requests, that were admitted and promised what they asked for."""
        return len([r for r in self.admitted[tenant] if self.promised[r.request_id] == r.promise]) / self.came[tenant]

    def kept(self) -> float:
        """Of the first tokens that were promised, those in time."""
        self.run.drain()
        in_time = [self.run.times[name][0] - self.at[name] <= promise.ttft_s for name, promise in self.promised.items()]
        return sum(in_time) / len(in_time)

    @property
    def names(self) -> list[str]:
        return [request.request_id for those in self.admitted.values() for request in those]


def serve(loads: list[Load], seed: int = 0, seconds: float = 120, mode: OnInfeasible = "reject", blind: bool = False) -> Served:
    """`blind`: as if nobody looked at whose a request is."""
    policy = SloPolicy(SloBudget(OnlineCostModel(COST), SloSettings(longest_s=0.4)))
    run = VirtualRun.of(Scheduler(CONFIG, policy))
    assert isinstance(run, VirtualRun)
    cost = run.budget.cost
    gate = run.scheduler.intake.gate = Gate(Solver(cost, cap=8192), mode, longest_s=0.4, relax=cost.relax)
    if blind:
        gate._shares = Blind()
    served = Served(run, {load.tenant: 0 for load in loads}, {load.tenant: [] for load in loads})
    for at, name, request in merge(*[load.arrivals(seed, seconds) for load in loads], key=lambda one: one[0]):
        while run.now < at:
            if run.step() is None:
                run.now = at
        served.came[request.tenant] += 1
        try:
            run.add(request)
        except RequestRefused:
            continue
        served.admitted[request.tenant].append(request)
        sequence = run.scheduler.sequence(name)
        assert sequence is not None
        served.at[name], served.promised[name] = run.now, sequence.promise
    return served


class Blind(Shares):
    """Sees nobody but who is there."""

    def came(self, newcomer: Sequence, now: float) -> bool:
        super().came(newcomer, now)
        return False
