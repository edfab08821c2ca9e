"""One promise for every request, the same under each configuration: asked for in the request, and judged by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.workloads import ClosedLoop, Interference, OpenLoop, PlannedRequest, Workload
from deploy.bench.record import RequestRecord, RunRecord
from deploy.bench.slo import SloTargets
from scheduler.slo import Promise

Change = Callable[[PlannedRequest], PlannedRequest]


@dataclass(frozen=True, slots=True)
class Promises:
    """By the prompt's length in tokens. A length that was not asked about gets what the next longer one has."""

    by_length: dict[int, SloTargets]

    @classmethod
    def of(cls, lengths: set[int], promise: Callable[[int], SloTargets]) -> Promises:
        """Raises what `promise` raises."""
        return cls({length: promise(length) for length in sorted(lengths)})

    def of_prompt(self, tokens: int) -> SloTargets:
        longer = next((length for length in self.by_length if length >= tokens), max(self.by_length, default=0))
        return self.by_length.get(longer, SloTargets())

    @property
    def common(self) -> SloTargets:
        """What is the same for all lengths."""
        each = list(self.by_length.values()) or [SloTargets()]
        ttft, tpot, tbt = ({getattr(slo, name) for slo in each} for name in ("ttft_s", "tpot_s", "tbt_s"))
        return SloTargets(*(next(iter(values)) if len(values) == 1 else None for values in (ttft, tpot, tbt)))

    @property
    def ttft_by_length(self) -> dict[int, float]:
        """Empty where it does not depend on the length."""
        found = {length: slo.ttft_s for length, slo in self.by_length.items() if slo.ttft_s is not None}
        return found if len(set(found.values())) > 1 else {}

    def asked_in(self, workload: Workload) -> Workload:
        """The same requests, each with its promise in its body."""

        def ask(request: PlannedRequest) -> PlannedRequest:
            slo = self.of_prompt(request.prompt_tokens or 1)
            return replace(request, extra={**request.extra, "slo": slo.as_body()}) if _whole(slo) else request

        return changed(workload, ask)

    def judging(self, run: RunRecord) -> RunRecord:
        def judged(record: RequestRecord) -> RequestRecord:
            slo = self.of_prompt(record.prompt_tokens or 1)
            return replace(record, slo=slo) if slo else record

        return replace(run, requests=tuple(map(judged, run.requests)))


def targets_of(promise: Promise) -> SloTargets:
    """What a server has promised, as what is asked of it."""
    return SloTargets(promise.ttft_s, promise.tpot_s, promise.tbt_s)


def lengths_of(workload: Workload) -> set[int]:
    return {request.prompt_tokens or 1 for request in workload.requests}


def changed(workload: Workload, change: Change) -> Workload:
    if isinstance(workload, OpenLoop):
        return OpenLoop([change(request) for request in workload.requests])
    if isinstance(workload, ClosedLoop):
        return replace(workload, requests=[change(request) for request in workload.requests])
    assert isinstance(workload, Interference)
    return replace(workload, streams=[change(stream) for stream in workload.streams], long=change(workload.long))


def _whole(slo: SloTargets) -> bool:
    """A request may only ask for both."""
    return slo.ttft_s is not None and slo.tpot_s is not None
