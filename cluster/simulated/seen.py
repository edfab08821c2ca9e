"""What was seen of each simulated request and of the iterations. All moments are seconds of the virtual clock."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.loop import IterationRecord
from cluster.workloads import PlannedRequest
from scheduler.budget import NOTHING_WANTED
from scheduler.orders import Moved
from scheduler.slo import Outcome, Promise


@dataclass(slots=True, eq=False)
class SeenRequest:
    """`tokens` has one moment for each token. `scheduled` is when the plan with its first chunk was made. `refused` is
    the code of the scheduler's refusal, `lost` why it ended otherwise than by its length. `left`: its reader had all it
    wanted and went away."""

    planned: PlannedRequest
    arrival: float
    prompt_tokens: int
    promise: Promise | None = None
    scheduled: float | None = None
    tokens: array[float] = field(default_factory=lambda: array("d"))
    ended: float | None = None
    refused: str | None = None
    lost: str | None = None
    left: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """None where it never had a token, or was never promised anything."""
        if not self.tokens or self.promise is None:
            return None
        gaps = self.gaps
        return Outcome(
            ttft_s=self.tokens[0] - self.arrival,
            tpot_s=(self.tokens[-1] - self.tokens[0]) / len(gaps) if gaps else None,
            largest_gap_s=max(gaps) if gaps else None,
            promise=self.promise,
        )

    @property
    def met(self) -> bool:
        """Whether it had all its tokens, and in time."""
        return self.as_promised(self.outcome)

    def as_promised(self, fared: Outcome | None) -> bool:
        """Whether it had all its tokens, and in time, where it `fared` so: by what it was to be promised, whatever that
        was relaxed to."""
        if self.refused is not None or self.lost is not None or fared is None or self.promise is None:
            return False
        return (fared if fared.promise is self.promise else replace(fared, promise=self.promise)).met

    @property
    def gaps(self) -> list[float]:
        times = self.tokens
        return [times[i] - times[i - 1] for i in range(1, len(times))]

    @property
    def delay(self) -> float:
        """Seconds from arrival until it was first in a plan; infinite for one that never was."""
        return math.inf if self.scheduled is None else self.scheduled - self.arrival


@dataclass(slots=True)
class KeptRequests:
    """Every request, with the moment of each of its tokens."""

    requests: list[SeenRequest] = field(default_factory=list)

    def came(self, seen: SeenRequest) -> None:
        self.requests.append(seen)

    def tokens_came(self, record: IterationRecord, seen: Mapping[str, SeenRequest]) -> None:
        for sequences, _ in record.timings.together:
            for sequence in sequences:
                seen[sequence.request_id].tokens.append(record.ended)
        for timing in record.timings.others:
            seen[timing.request_id].tokens.append(record.ended)

    def ended(self, seen: SeenRequest, fared: Outcome | None) -> None:
        pass


@dataclass(slots=True)
class SeenIterations:
    """Of all groups together. `budgets` are those of the iterations that had prompts to decide about."""

    count: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decodes: int = 0
    budgets: int = 0
    budget_tokens: int = 0
    preemptions: int = 0
    longest_s: float = 0.0

    def note(self, record: IterationRecord) -> None:
        under_way, took = record.under_way, record.actual_s
        self.count += 1
        self.busy_s += took
        if took > self.longest_s:
            self.longest_s = took
        self.preemptions += len(under_way.preempted)
        for features in under_way.features:
            self.prefill_tokens += features.prefill_tokens
            self.decodes += features.decodes
        if under_way.decision.bound != NOTHING_WANTED.bound:
            self.budgets += 1
            self.budget_tokens += under_way.decision.token_budget

    @property
    def mean_budget(self) -> float:
        """Prompt tokens that an iteration was allowed, where there were prompts; 0 where there never were."""
        return self.budget_tokens / self.budgets if self.budgets else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of a group."""

    group: int
    started: float
    ended: float
    prefill_tokens: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished run. `ended` is the moment at which the last request ended; `gpus` that all `groups` together
    have.
    `gave_up`: more requests had missed their promise than may, so that the rest was not waited for. `steps` are all
    iterations, where they were to be kept; `moved` the KV that went from one group to another."""

    requests: Sequence[SeenRequest]
    iterations: SeenIterations
    ended: float
    groups: int
    gpus: int
    gave_up: bool = False
    steps: tuple[Step, ...] = ()
    moved: tuple[Moved, ...] = ()

    @property
    def attainment(self) -> float:
        """Share of requests that had all their tokens in time; 1 where there were none."""
        return sum(request.met for request in self.requests) / len(self.requests) if self.requests else 1.0

    def missed_what(self) -> str:
        """Which promises were missed by how many requests, the most frequent first; for a person."""
        missed: Counter[str] = Counter()
        for request in self.requests:
            if request.refused is not None or request.lost is not None:
                missed[request.refused or request.lost or ""] += 1
            elif (outcome := request.outcome) is not None and not outcome.met:
                missed["TPOT" if outcome.ttft_met else "TTFT" if outcome.tpot_met else "TTFT and TPOT"] += 1
        return ", ".join(f"{name} missed by {count}" for name, count in missed.most_common()) or "none missed"

    def gap_quantile(self, quantile: float) -> float:
        """Of all gaps between tokens of all requests (time between tokens, TBT); 0 where there were none."""
        return quantile_of([gap for request in self.requests for gap in request.gaps], quantile)

    def delay_quantile(self, quantile: float) -> float:
        """Of the scheduling delays of all requests."""
        return quantile_of([request.delay for request in self.requests], quantile)


def quantile_of(values: list[float], quantile: float) -> float:
    """The smallest value that a share of `quantile` does not exceed."""
    if not values:
        return 0.0
    values.sort()
    return values[max(0, math.ceil(quantile * len(values)) - 1)]
