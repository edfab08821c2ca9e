"""A simulation of which only totals were kept, as the load test tells a run: the same figures, without its requests."""

from __future__ import annotations

from typing import Any

from cluster.simulated.seen import Simulation
from cluster.simulated.totals import Histogram, Totals
from deploy.bench.figures import Figures
from deploy.bench.record import RunRecord
from deploy.bench.slo import SloTargets
from deploy.bench.spread import Spread
from scheduler.slo import Outcome

ROUGH = "totals only: percentiles are the middles of classes that are 1 % wide"


def totals_for(slo: SloTargets) -> Totals:
    """That count what keeps these targets."""

    def kept(fared: Outcome) -> bool:
        return slo.met_by(fared.ttft_s, fared.tpot_s, fared.largest_gap_s)

    return Totals(kept)


def told(totals: Totals, simulation: Simulation, slo: SloTargets, facts: dict[str, Any]) -> tuple[RunRecord, Figures]:
    """As of a run whose requests are all there."""
    window_s = simulation.ended
    run = RunRecord(
        requests=(), duration_s=window_s, started_at=0.0, open_loop=False, planned=totals.requests, facts=facts
    )
    failed = totals.requests - totals.finished
    met = totals.met if slo else 0
    found = Figures(
        requests=totals.requests,
        finished=totals.finished,
        failed=failed,
        unfinished=0,
        errors=dict(totals.errors.most_common()),
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.tokens,
        ttft=_spread(totals.ttft),
        tpot=_spread(totals.tpot),
        itl=_spread(totals.gaps),
        e2e=_spread(totals.lasted),
        met=met,
        attainment=met / totals.requests if slo and totals.requests else None,
        window_s=window_s,
        skipped=0,
        requests_per_s=_rate(totals.finished, window_s),
        tokens_per_s=_rate(totals.tokens, window_s),
        goodput_per_s=_rate(met, window_s) if slo else None,
        largest_stall_at_s=None,
        lateness=Spread(0),
        slo=slo,
        by_kind={},
        intrusion=None,
        warnings=(ROUGH,),
    )
    return run, found


def _spread(histogram: Histogram) -> Spread:
    n = histogram.n
    if not n:
        return Spread(0)
    p50, p90, p99 = (min(histogram.quantile(share), histogram.longest) for share in (0.5, 0.9, 0.99))
    return Spread(n, histogram.seconds / n, p50, p90, p99, histogram.longest)


def _rate(count: int, window_s: float) -> float:
    return count / window_s if window_s > 0 else 0.0
