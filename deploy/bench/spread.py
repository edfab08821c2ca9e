"""How a quantity is spread: its percentiles, and of how many values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles between two values are interpolated between them in a straight line, as numpy.percentile does. All
    None where there is no value."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Of the values that are there."""
        known = np.array([value for value in values if value is not None], dtype=float)
        if not known.size:
            return cls(0)
        p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
        return cls(int(known.size), float(known.mean()), p50, p90, p99, float(known.max()))

    def as_json(self) -> dict[str, float | int | None]:
        """From seconds to milliseconds."""
        return {"n": self.n} | {name: ms(getattr(self, name)) for name in ("mean", "p50", "p90", "p99", "max")}


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3 if seconds >= 1e-3 else 6)
