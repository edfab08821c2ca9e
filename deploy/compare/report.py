"""A comparison as JSON, and as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.config import EngineConfig
from deploy.bench.report import found_json, request_json
from deploy.bench.show import duration
from deploy.bench.spread import Spread, ms
from deploy.compare.comparison import Compared, Comparison, Measured
from deploy.compare.verdict import verdict

FORMAT = "stallfree-compare/1"
LENGTHS = 16
"""Of prompts, whose promised TTFT is told one by one."""


def as_json(found: Comparison, *, raw: bool = False) -> dict[str, Any]:
    """Milliseconds, with the unit in the name. `raw` adds each request with its tokens' times."""
    return {
        "format": FORMAT,
        "verdict": verdict(found),
        "interrupted": found.interrupted,
        "facts": found.facts,
        "asked": _asked(found.plan.base),
        "slo": {
            **found.promised.as_body(),
            "ttft_ms_by_prompt_tokens": {str(tokens): ms(ttft) for tokens, ttft in _few(found, LENGTHS)},
        },
        "warnings": found.warnings,
        "configurations": [_compared(compared, raw) for compared in found.compared],
    }


def _asked(base: EngineConfig) -> dict[str, Any]:
    return base.model_dump(mode="json", exclude_defaults=True)


def _compared(compared: Compared, raw: bool) -> dict[str, Any]:
    return {
        "name": compared.name,
        "failure": compared.failure,
        "resources": None if compared.resources is None else compared.resources.as_json(),
        "runs": [_run(run, raw) for run in compared.runs],
    }


def _run(run: Measured, raw: bool) -> dict[str, Any]:
    offered = run.load.offered_per_s
    moved = run.transfers
    content = {
        "load": run.load.name or None,
        "offered_per_s": None if offered is None else round(offered, 4),
        **found_json(run.figures),
        "second_token_ms": run.second_token.as_json(),
        "kv_transfer_ms": None if moved is None else run.transfer.as_json(),
        "kv_transfer_bytes": None if moved is None else moved.total_bytes,
    }
    if raw:
        content["raw"] = [request_json(record) for record in run.record.requests]
    return content


def _times(compared: Compared, run: Measured) -> tuple[str, ...]:
    found = run.figures
    return (
        compared.name,
        f"{_p50_p99(found.ttft)} ({found.ttft.n:,})",
        _p50_p99(run.second_token),
        f"{_p50_p99(found.tpot)} ({found.tpot.n:,})",
        f"{_p50_p99(found.itl)} ({found.itl.n:,})",
        duration(found.largest_stall_s),
    )


def _rates(compared: Compared, run: Measured) -> tuple[str, ...]:
    found = run.figures
    ended = found.finished + found.failed
    return (
        compared.name,
        f"{found.finished} of {found.requests}",
        f"{found.tokens_per_s:.1f}",
        "-" if found.attainment is None else f"{found.attainment:.1%} ({found.met} of {ended})",
        "-" if found.goodput_per_s is None else f"{found.goodput_per_s:.3f}",
        f"{_p50_p99(run.transfer)} ({run.transfer.n:,})" if run.transfers else "-",
    )


def _p50_p99(spread: Spread) -> str:
    return f"{duration(spread.p50)} / {duration(spread.p99)}"


_TIMES = (
    "configuration",
    "TTFT p50 / p99 (n)",
    "second token p50 / p99",
    "TPOT p50 / p99 (n)",
    "ITL p50 / p99 (n)",
    "largest stall",
)
_RATES = ("configuration", "finished", "tokens/s", "attainment", "goodput, requests/s", "KV transfer p50 / p99 (n)")
TABLES: tuple[tuple[tuple[str, ...], Callable[[Compared, Measured], tuple[str, ...]]], ...] = (
    (_TIMES, _times),
    (_RATES, _rates),
)
"""Their columns, and what gives the cells of a run."""


def loads_of(found: Comparison) -> list[tuple[str, list[tuple[Compared, Measured]]]]:
    """By load: its name and the run of each configuration that has one."""
    by_load = []
    for number, load in enumerate(found.plan.loads):
        runs = [(compared, compared.runs[number]) for compared in found.measured if len(compared.runs) > number]
        by_load.append((load.name, runs))
    return by_load


def notes(found: Comparison) -> list[str]:
    """What the tables do not say: the promise, what each had, what could not be run."""
    said = [f"promised to every request, under each configuration: {_promise(found)}"]
    by_resources: dict[str, list[str]] = {}
    for compared in found.measured:
        if compared.resources is not None:
            by_resources.setdefault(compared.resources.describe(), []).append(compared.name)
    said += [f"{', '.join(names)}: {what}" for what, names in by_resources.items()]
    for compared in found.compared:
        if compared.failure:
            what = (
                f"was run under {len(compared.runs)} of {len(found.plan.loads)} loads"
                if compared.runs
                else "was not run"
            )
            said.append(f"{compared.name} {what}: {compared.failure}")
    return said


def warnings(found: Comparison) -> list[str]:
    told = list(found.warnings)
    if found.interrupted:
        told.append(f"interrupted: {len(found.finished)} of {len(found.compared)} configurations had ended")
    for compared in found.measured:
        for run in compared.runs:
            name = f"{compared.name}, {run.load.name}" if run.load.name else compared.name
            told += [f"{name}: {warning}" for warning in run.figures.warnings]
            told += [f"{name}: {count} x {kind}" for kind, count in run.figures.errors.items()]
    return told


def _promise(found: Comparison) -> str:
    slo = found.promised
    by_length = [f"{duration(ttft)} for {tokens:,} tokens" for tokens, ttft in _few(found, 4)]
    ttft = ", ".join(by_length) if slo.ttft_s is None else duration(slo.ttft_s)
    told = [
        *([f"TTFT {ttft}"] if ttft else []),
        *([] if slo.tpot_s is None else [f"TPOT {duration(slo.tpot_s)}"]),
        *([] if slo.tbt_s is None else [f"no gap above {duration(slo.tbt_s)}"]),
    ]
    return "; ".join(told) or "nothing"


def _few(found: Comparison, most: int) -> list[tuple[int, float]]:
    """At most so many prompt lengths with their TTFT, evenly from all, the shortest and the longest among them."""
    pairs = sorted(found.ttft_by_length.items())
    if len(pairs) <= most:
        return pairs
    return [pairs[round(index * (len(pairs) - 1) / (most - 1))] for index in range(most)]
