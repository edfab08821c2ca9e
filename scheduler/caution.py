"""By how much first tokens come later than forecast, whatever the reason, as far as it takes to keep promises."""

from __future__ import annotations

import math

MISSED = 0.02
"""Of the promises given, that may be missed."""
STEP = 0.5
FORGOTTEN_S = 5.0
"""Of a scheduler with nothing to do, until half of it is forgotten: what made first tokens late is over."""
LEAST, MOST = 1.4, 3.0
"""Forecasts are of the average: of those that are just in time by them, about half are late."""


class Caution:
    """A factor on forecasts that is learned from what became of the promises given by them.

    Every promise that is missed raises it, and every one that is kept lowers it by as much less as misses are to be
    rarer than that: so in the long run that share of them is missed, however forecasts and what happens are distributed
    (adaptive conformal inference, Gibbs and Candes, NeurIPS 2021).
    """

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return LEAST * math.exp(self._log)

    def learn(self, kept: bool) -> None:
        moved = self._log + (-STEP * MISSED if kept else STEP * (1 - MISSED))
        self._log = min(max(0.0, moved), math.log(MOST / LEAST))

    def forget(self, idle_s: float) -> None:
        self._log *= 0.5 ** (idle_s / FORGOTTEN_S)
