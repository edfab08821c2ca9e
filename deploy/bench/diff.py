"""Two runs side by side, from the JSON that they left."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deploy.bench.report import FORMAT
from deploy.errors import CommandError

_SPREADS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_GAPS = {"gaps_before_ms": "gaps before", "gaps_during_ms": "gaps during"}
_PERCENTILES = ("n", "mean", "p50", "p90", "p99", "max")
_SINGLE = {
    "largest_stall_ms": "largest stall, ms",
    "requests": "requests",
    "finished": "finished",
    "failed": "failed",
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "attainment": "attainment",
    "goodput_per_s": "goodput, requests/s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs; None where a run has none."""

    name: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        """b / a."""
        return None if self.a is None or self.b is None or self.a == 0 else self.b / self.a


def read_run(path: Path) -> dict[str, Any]:
    """What `stallfree bench --output` wrote. Raises CommandError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--diff: {path} cannot be read: {error.strerror}", 2) from None
    except (ValueError, RecursionError):
        raise CommandError(f"--diff: {path} is no JSON", 2) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CommandError(f"--diff: {path} is no result of stallfree bench", 2)
    return content


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """All figures that at least one of them has."""
    figures: list[tuple[str, tuple[str, ...]]] = []
    for key, label in _SPREADS.items():
        figures += [(_named(label, name), (key, name)) for name in _PERCENTILES]
    figures += [(label, (key,)) for key, label in _SINGLE.items()]
    figures.append(("TTFT of the long prompt, ms", ("interference", "ttft_long_ms")))
    for key, label in _GAPS.items():
        figures += [(_named(label, name), ("interference", key, name)) for name in ("n", "p50", "max")]
    rows = [Row(name, _at(a, path), _at(b, path)) for name, path in figures]
    return [row for row in rows if row.a is not None or row.b is not None]


def as_table(rows: list[Row]) -> Table:
    table = Table("figure", "A", "B", "B / A")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.name, _shown(row.a), _shown(row.b), "-" if row.ratio is None else f"{row.ratio:.2f}")
    return table


def diff_json(rows: list[Row]) -> dict[str, Any]:
    shown = [{"figure": row.name, "a": row.a, "b": row.b, "ratio": row.ratio} for row in rows]
    return {"format": "stallfree-bench-diff/1", "rows": shown}


def _named(label: str, name: str) -> str:
    return f"{label} n" if name == "n" else f"{label} {name}, ms"


def _at(content: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    if isinstance(content, bool) or not isinstance(content, (int, float)) or not math.isfinite(content):
        return None
    return float(content)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.2f}"
