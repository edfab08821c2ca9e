"""How long the rest of a prompt takes: alone, and beside all that shares the iterations with it."""

from __future__ import annotations

from scheduler.budget import Decision
from scheduler.costmodel import OnlineCostModel
from scheduler.policies.base import Mix
from scheduler.request import Sequence
from scheduler.roofline import Features

OTHERS = Features().with_chunk(0, 512)
"""Prompt tokens that are there anyway: what a prompt costs is what it adds, and not reading the weights once more."""
LEARNED = 0.1
"""Part of what an iteration tells that counts."""


class Pace:
    """Streams take a part of every iteration, and so prompts take longer than they would alone: how many times is
    learned from those iterations in which prompts had all the room that there was."""

    __slots__ = ("_cost", "_others_s", "slowdown")

    def __init__(self, cost: OnlineCostModel) -> None:
        self._cost = cost
        self._others_s = cost.base.predict(OTHERS)
        self.slowdown = 1.0

    def rest_of(self, sequence: Sequence) -> float:
        """Seconds of iterations that have streams as the last ones had."""
        return self.slowdown * self._cost.of_prompts * self.alone(sequence)

    def alone(self, sequence: Sequence) -> float:
        """Seconds of a machine that does nothing else, before correction.

        Few of the prompts get on in an iteration: of the others it is known from the one before.
        """
        target, done = sequence.prefill_target or sequence.length, sequence.computed or sequence.reusable
        known = sequence.work
        if known is None or known[0] != done or known[1] != target:
            with_it = self._cost.base.predict(OTHERS.with_chunk(done, target - done))
            known = sequence.work = done, target, with_it - self._others_s
        return known[2]

    def learn(self, fused: Mix, decision: Decision) -> None:
        """From what is about to run. Where there was room for more prompts than there were, it tells the most that they
        may be slowed down."""
        chunks = OTHERS
        for draft in fused.chunks:
            chunks = chunks.with_chunk(draft.sequence.computed, draft.count)
        alone = self._cost.base.predict(chunks) - self._others_s
        if alone <= 0:
            return
        slowdown = self._cost.predict(fused.features) / (self._cost.of_prompts * alone)
        if decision.bound == "prompts":
            self.slowdown = min(self.slowdown, slowdown)
        else:
            self.slowdown += LEARNED * (slowdown - self.slowdown)
