"""Figures of the requests of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.bench.record import Outcome, RequestRecord
from deploy.bench.slo import SloTargets
from deploy.bench.spread import Spread, ms


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Seconds. TTFT, ITL and TPOT are of whatever tokens came, those of failed requests too; E2E of finished requests.
    `attainment` is the share of finished and failed requests that met the promises, None where nothing was promised or
    none has ended."""

    requests: int
    finished: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    met: int
    attainment: float | None

    @property
    def largest_stall_s(self) -> float | None:
        """The longest time between two tokens of a stream."""
        return self.itl.max

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "finished": self.finished,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": self.ttft.as_json(),
            "tpot_ms": self.tpot.as_json(),
            "itl_ms": self.itl.as_json(),
            "e2e_ms": self.e2e.as_json(),
            "largest_stall_ms": ms(self.largest_stall_s),
            "attainment": None if self.attainment is None else round(self.attainment, 6),
        }


def kind_figures(records: Sequence[RequestRecord], slo: SloTargets) -> KindFigures:
    outcomes = Counter(record.outcome for record in records)
    ended = outcomes[Outcome.FINISHED] + outcomes[Outcome.FAILED]
    promised = bool(slo) or any(record.slo for record in records)
    met = sum(meets(record, slo) for record in records) if promised else 0
    return KindFigures(
        requests=len(records),
        finished=outcomes[Outcome.FINISHED],
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in records if record.outcome is Outcome.FINISHED),
        output_tokens=sum(len(record.tokens) for record in records),
        ttft=Spread.of(record.ttft_s for record in records),
        tpot=Spread.of(record.tpot_s for record in records),
        itl=Spread.of(gap for record in records for gap in record.gaps),
        e2e=Spread.of(record.e2e_s for record in records if record.outcome is Outcome.FINISHED),
        met=met,
        attainment=met / ended if promised and ended else None,
    )


def meets(record: RequestRecord, slo: SloTargets) -> bool:
    """Whether it finished and kept every promise: its own, or else the run's."""
    if record.outcome is not Outcome.FINISHED:
        return False
    return (record.slo or slo).met_by(record.ttft_s, record.tpot_s, max(record.gaps, default=None))
