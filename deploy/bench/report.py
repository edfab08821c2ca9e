"""A run's figures as JSON, and as a table for people."""

from __future__ import annotations

from typing import Any

from deploy.bench.figures import Figures
from deploy.bench.record import RequestRecord, RunRecord
from deploy.bench.spread import ms

FORMAT = "stallfree-bench/1"


def as_json(run: RunRecord, found: Figures, *, raw: bool = False) -> dict[str, Any]:
    """Milliseconds, with the unit in the name, on the run's clock. `raw` adds each request with its tokens' times."""
    content = {
        "format": FORMAT,
        "started_at": round(run.started_at, 3),
        "duration_s": round(run.duration_s, 3),
        "interrupted": run.interrupted,
        "planned": run.planned,
        "target": run.facts,
        "slo": found.slo.as_body(),
        "window_s": round(found.window_s, 3),
        "skipped": found.skipped,
        **found_json(found),
    }
    if raw:
        content["raw"] = [request_json(record) for record in run.requests]
    return content


def found_json(found: Figures) -> dict[str, Any]:
    stall_at = found.largest_stall_at_s
    return {
        **found.as_json(),
        "largest_stall_at_s": None if stall_at is None else round(stall_at, 3),
        "requests_per_s": round(found.requests_per_s, 4),
        "tokens_per_s": round(found.tokens_per_s, 3),
        "goodput_per_s": None if found.goodput_per_s is None else round(found.goodput_per_s, 4),
        "lateness_ms": found.lateness.as_json(),
        "by_kind": {kind: figures.as_json() for kind, figures in found.by_kind.items()},
        "interference": found.intrusion.as_json() if found.intrusion else None,
        "warnings": list(found.warnings),
    }


def request_json(record: RequestRecord) -> dict[str, Any]:
    return {
        "kind": record.kind,
        "outcome": record.outcome.value,
        "error": record.error,
        "message": record.message,
        "due_ms": ms(record.due_s),
        "sent_ms": ms(record.sent_s),
        "ended_ms": ms(record.ended_s),
        "prompt_tokens": record.prompt_tokens,
        "asked_tokens": record.asked_tokens,
        "counted_by": record.counted_by.value if record.counted_by else None,
        "tokens_ms": [ms(when) for when in record.tokens],
    }
