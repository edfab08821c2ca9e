"""The figures of a run."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.bench.intrusion import Intrusion, intrusion
from deploy.bench.kinds import KindFigures, kind_figures
from deploy.bench.record import CountedBy, RequestRecord, RunRecord
from deploy.bench.slo import SloTargets
from deploy.bench.spread import Spread

LATE_S = 0.05
"""Beyond this the client itself is too slow for the load that it should be."""


@dataclass(frozen=True, slots=True)
class Figures(KindFigures):
    """Of all requests that were due in the measured window (see `figures`), in seconds; `by_kind` has the same for each
    kind, and `intrusion` what an interference run shows. `goodput_per_s` counts the requests that met the promises.
    `lateness` is how much later than planned this client sent (open loop only). `skipped` requests are in none of
    it."""

    window_s: float
    skipped: int
    requests_per_s: float
    tokens_per_s: float
    goodput_per_s: float | None
    largest_stall_at_s: float | None
    lateness: Spread
    slo: SloTargets
    by_kind: dict[str, KindFigures]
    intrusion: Intrusion | None
    warnings: tuple[str, ...]


def figures(run: RunRecord, slo: SloTargets | None = None, *, skip_s: float = 0.0) -> Figures:
    """Requests due before `skip_s` are left out. The window goes from there to the last end of a counted request, and
    rates are what was counted by the window's length: finished requests, output tokens, met promises."""
    slo = slo or SloTargets()
    records = [record for record in run.requests if record.due_s >= skip_s]
    window_s = max((record.ended_s for record in records), default=skip_s) - skip_s
    total = kind_figures(records, slo)
    late = Spread.of(record.late_s for record in records) if run.open_loop else Spread(0)
    kinds = sorted({record.kind for record in records})
    disturbed = intrusion(records)
    return Figures(
        **{name: getattr(total, name) for name in KindFigures.__dataclass_fields__},
        window_s=window_s,
        skipped=len(run.requests) - len(records),
        requests_per_s=_rate(total.finished, window_s),
        tokens_per_s=_rate(total.output_tokens, window_s),
        goodput_per_s=None if total.attainment is None else _rate(total.met, window_s),
        largest_stall_at_s=_largest_stall_at(records),
        lateness=late,
        slo=slo,
        by_kind={kind: kind_figures([record for record in records if record.kind == kind], slo) for kind in kinds},
        intrusion=disturbed,
        warnings=tuple(_warnings(run, records, late, disturbed)),
    )


def _rate(count: int, window_s: float) -> float:
    return count / window_s if window_s > 0 else 0.0


def _largest_stall_at(records: list[RequestRecord]) -> float | None:
    """When it began, on the run's clock."""
    stalls = [(gap, record.tokens[index]) for record in records for index, gap in enumerate(record.gaps)]
    return max(stalls)[1] if stalls else None


def _warnings(run: RunRecord, records: list[RequestRecord], late: Spread, disturbed: Intrusion | None) -> list[str]:
    """What a reader of the figures must know before believing them."""
    found = []
    if run.interrupted:
        found.append(f"interrupted: {len(run.requests)} of {run.planned} requests had been sent")
    if late.p99 is not None and late.p99 > LATE_S:
        found.append(
            f"this client sent late (p99 {late.p99 * 1e3:.0f} ms): it could not keep up, the load was not as planned"
        )
    if not any(record.tokens for record in records):
        found.append("no token came")
    counted = {record.counted_by for record in records}
    if CountedBy.CHUNKS in counted:
        found.append("the server does not count its tokens: a chunk was taken for one token")
    if CountedBy.FINAL_USAGE in counted:
        found.append("the server counts its tokens at the end only: some chunks have several, ITL is approximate")
    if disturbed is not None and disturbed.running < disturbed.streams:
        ended = disturbed.streams - disturbed.running
        found.append(f"{ended} of {disturbed.streams} streams had ended before the long prompt was sent")
    return found
