"""What is kept of a simulation's requests where the requests themselves are not: as much for ten as for ten million."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.loop import IterationRecord
from cluster.simulated.seen import SeenRequest
from scheduler.slo import Outcome

WIDTH = math.log(1.01)
"""Of a histogram's class, of the logarithm: a quantile is off by half a percent at most."""
LEAST = 1e-6
"""Seconds; what is shorter counts as this."""


@dataclass(slots=True)
class Histogram:
    """Durations in classes that are 1 % wide. Infinite ones are a class of their own."""

    counts: Counter[float] = field(default_factory=Counter)
    longest: float = 0.0
    seconds: float = 0.0
    """Of all of them."""

    @property
    def n(self) -> int:
        return self.counts.total()

    def note(self, seconds: float, times: int = 1) -> None:
        self.seconds += seconds * times
        if seconds > self.longest:
            self.longest = seconds
        self.counts[seconds if math.isinf(seconds) else round(math.log(max(seconds, LEAST)) / WIDTH)] += times

    def quantile(self, quantile: float) -> float:
        """The smallest class that a share of `quantile` does not exceed, by its middle; 0 where nothing was noted."""
        wanted = max(1, math.ceil(quantile * self.counts.total()))
        for of, count in sorted(self.counts.items()):
            wanted -= count
            if wanted <= 0:
                return of if math.isinf(of) else math.exp(of * WIDTH)
        return 0.0


@dataclass(slots=True)
class Totals:
    """Of requests that have ended or were refused. `met`: had all their tokens, and in time: by `kept`, where that is
    given, and otherwise by what they were promised. `delays` are those until a request is first in a plan."""

    kept: Callable[[Outcome], bool] | None = None
    requests: int = 0
    finished: int = 0
    met: int = 0
    prompt_tokens: int = 0
    """Of the finished ones."""
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=Histogram)
    lasted: Histogram = field(default_factory=Histogram)
    """From arrival to the end, of the finished ones."""
    delays: Histogram = field(default_factory=Histogram)

    def came(self, seen: SeenRequest) -> None:
        pass

    def tokens_came(self, record: IterationRecord, seen: Mapping[str, SeenRequest]) -> None:
        together, others = record.timings.together, record.timings.others
        self.tokens += len(others)
        for sequences, gap_s in together:
            self.tokens += len(sequences)
            self.gaps.note(gap_s, len(sequences))
        for timing in others:
            if timing.gap_s is not None:
                self.gaps.note(timing.gap_s)
            elif timing.since_arrival_s is not None:
                self.ttft.note(timing.since_arrival_s)

    def ended(self, seen: SeenRequest, fared: Outcome | None) -> None:
        self.requests += 1
        self.delays.note(seen.delay)
        if fared is not None and fared.tpot_s is not None:
            self.tpot.note(fared.tpot_s)
        error = seen.refused or seen.lost
        if error is not None:
            self.errors[error] += 1
            return
        self.finished += 1
        self.prompt_tokens += seen.prompt_tokens
        if seen.ended is not None:
            self.lasted.note(seen.ended - seen.arrival)
        self.met += seen.as_promised(fared) if self.kept is None else fared is not None and self.kept(fared)

    @property
    def attainment(self) -> float:
        return self.met / self.requests if self.requests else 1.0
