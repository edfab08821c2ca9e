"""What is promised for every request of a run, by which its verdict is found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Seconds; None where nothing is asked. A request meets them if its first token came within `ttft_s`, the mean of
    its gaps is at most `tpot_s`, and no single gap is above `tbt_s`."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "tbt_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value}")

    def __bool__(self) -> bool:
        """Whether anything is asked at all."""
        return any(value is not None for value in (self.ttft_s, self.tpot_s, self.tbt_s))

    def met_by(self, ttft_s: float | None, tpot_s: float | None, largest_gap_s: float | None) -> bool:
        """A request without a first token meets nothing; one with a single token has no gaps to be late in."""
        if ttft_s is None:
            return False
        seen = ((self.ttft_s, ttft_s), (self.tpot_s, tpot_s), (self.tbt_s, largest_gap_s))
        return all(wanted is None or value is None or value <= wanted for wanted, value in seen)

    def as_body(self) -> dict[str, float]:
        """As the field `slo` of a request's body: milliseconds."""
        asked = {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "tbt_ms": self.tbt_s}
        return {name: round(value * 1e3, 6) for name, value in asked.items() if value is not None}


def parse_slo(text: str) -> SloTargets:
    """`ttft_ms=2000,tpot_ms=100,tbt_ms=300`, each of them optional. Raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ("ttft_ms", "tpot_ms", "tbt_ms") or name in found:
            raise ValueError(f"give ttft_ms, tpot_ms and tbt_ms once each, such as ttft_ms=2000,tpot_ms=100: {text!r}")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"{name} is no number of milliseconds: {value!r}") from None
    return SloTargets(**{f"{name.removesuffix('_ms')}_s": value / 1e3 for name, value in found.items()})
