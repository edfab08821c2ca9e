"""A run's figures on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deploy.bench.figures import Figures
from deploy.bench.kinds import KindFigures
from deploy.bench.record import RunRecord
from deploy.bench.spread import Spread

COLUMNS = ("n", "mean", "p50", "p90", "p99", "max")


def show(console: Console, run: RunRecord, found: Figures) -> None:
    facts = run.facts
    console.print(f"{facts.get('model')} at {facts.get('url')}, {facts.get('loop')}", highlight=False, markup=False)
    several = len(found.by_kind) > 1
    for kind, figures in (found.by_kind if several else {"": found}).items():
        console.print(_spreads(kind, figures))
    for line in lines(found):
        console.print(line, highlight=False, markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _spreads(kind: str, figures: KindFigures) -> Table:
    table = Table(*([kind or "time"]), *COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("ttft", "tpot", "itl", "e2e"):
        table.add_row(name.upper(), *spread_cells(getattr(figures, name)))
    return table


def spread_cells(spread: Spread) -> list[str]:
    """In the order of COLUMNS."""
    return [f"{spread.n:,}", *(duration(getattr(spread, column)) for column in COLUMNS[1:])]


def lines(found: Figures) -> list[str]:
    """What the tables of times do not say."""
    ended = f"{found.finished} of {found.requests} requests finished in {found.window_s:.1f} s"
    said = [
        f"{ended}: {found.requests_per_s:.2f} requests/s, {found.tokens_per_s:.1f} tokens/s"
        + (f", {found.skipped} not counted" if found.skipped else "")
    ]
    if found.largest_stall_s is not None:
        at = "" if found.largest_stall_at_s is None else f", at {found.largest_stall_at_s:.1f} s"
        said.append(f"largest stall {duration(found.largest_stall_s)}{at}")
    if found.intrusion is not None:
        seen = found.intrusion
        said.append(
            f"the long prompt's first token after {duration(seen.ttft_long_s)}; gaps of the streams "
            f"{duration(seen.before.p50)} before (p50, n {seen.before.n}), {duration(seen.during.p50)} during "
            f"(p50, n {seen.during.n}; max {duration(seen.during.max)})"
        )
    if found.attainment is not None and found.goodput_per_s is not None:
        asked = ", ".join(f"{name} {value:g}" for name, value in found.slo.as_body().items())
        said.append(
            f"attainment {found.attainment:.1%}, goodput {found.goodput_per_s:.2f} requests/s ({asked}; "
            f"{found.met} of {found.finished + found.failed})"
        )
    if found.lateness.n:
        said.append(f"requests were sent {duration(found.lateness.p99)} after they were due (p99)")
    if found.errors:
        said.append("errors: " + ", ".join(f"{count} x {kind}" for kind, count in found.errors.items()))
    return said


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if 0 < seconds < 1e-4:  # a transfer of KV over a fast link
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
