"""What a call of `benchmarks/published.py` asks for, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """`duration` in seconds of arrivals; `rows` of a trace at most."""

    seeds: int
    duration: float
    rows: int
    conversation: Path | None = None
    code: Path | None = None
    mooncake_trace: Path | None = None
