"""One iteration as it happened, for those who watch a loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduler.plan import IterationPlan, IterationResult
from scheduler.progress import InFlight, Served, Timings
from scheduler.request import Delta
from scheduler.roofline import Features


class Observer(Protocol):
    """Whoever watches a loop. Called on its event loop: it has to be quick, and must not raise."""

    def iteration(self, record: IterationRecord) -> None:
        """Before the next plan is made, which waits for it."""

    def afterwards(self, record: IterationRecord) -> None:
        """Of the same iteration, once its tokens are published: the next plan may be on its way by then."""

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        """What ended outside of any iteration: aborted, stopped by its reader, outgrown the pool, failed."""


class IterationRecord(NamedTuple):
    """One iteration as it happened. Times are seconds of the loop's clock: plan made, result committed.

    One that was sent while another ran starts when that one ends. `under_way` is what the scheduler knew of it,
    `predicted_s` what it was expected to take when it was sent (None where nobody can tell), and `served` the requests
    that it ended as they should.
    """

    plan: IterationPlan
    result: IterationResult
    under_way: InFlight
    predicted_s: float | None
    started: float
    ended: float
    deltas: list[Delta]
    timings: Timings
    served: list[Served]

    @property
    def features(self) -> tuple[Features, ...]:
        """Of each of its forwards."""
        return self.under_way.features

    @property
    def actual_s(self) -> float:
        return self.ended - self.started

    @property
    def prefill_tokens(self) -> int:
        return sum(forward.prefill_tokens for forward in self.features)

    @property
    def decodes(self) -> int:
        return sum(forward.decodes for forward in self.features)
