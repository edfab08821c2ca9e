"""By how much first tokens come later than forecast, whatever the reason, as far as it takes to keep promises."""

from __future__ import annotations

import math

MISSED = 0.02
"""Of the promises given, that may be missed."""
STEP = 0.5
FORGOTTEN_S = 5.0
"""Without a prompt there, until half of it is forgotten: what made first tokens late is over."""
LEAST, MOST = 1.4, 3.0
"""Forecasts are of the average: of those that are just in time by them, about half are late."""
OWN, OWN_S = 1.05, 0.1
"""Of a long prompt's own iterations, which others are not part of, so much is enough: a factor, and seconds."""


class Caution:
    """A factor on forecasts that is learned from what became of the promises given by them.

    Every promise that is missed raises it, and every one that is kept lowers it by as much less as misses are to be
    rarer than that: so in the long run that share of them is missed, however forecasts and what happens are distributed
    (adaptive conformal inference, Gibbs and Candes, NeurIPS 2021).
    """

    __slots__ = ("_known_at", "_log")

    def __init__(self) -> None:
        self._log = 0.0
        self._known_at = 0.0

    @property
    def factor(self) -> float:
        return LEAST * math.exp(self._log)

    def of(self, seconds: float, own_s: float) -> float:
        """Of what was forecast, that a newcomer's own prompt takes `own_s` of where nobody else is there."""
        own_s = min(own_s, seconds)
        return math.exp(self._log) * (own(own_s) + LEAST * (seconds - own_s))

    def learn(self, kept: bool, now: float) -> None:
        moved = self._log + (-STEP * MISSED if kept else STEP * (1 - MISSED))
        self._log = min(max(0.0, moved), math.log(MOST / LEAST))
        self._known_at = max(now, self._known_at)

    def look(self, now: float, quiet: bool) -> None:
        """At who is there: `quiet` where no prompt is, and so none was since the last look. Streams alone may run for
        ever, and teach nothing of first tokens."""
        if quiet:
            self._log *= 0.5 ** (max(0.0, now - self._known_at) / FORGOTTEN_S)
        self._known_at = max(now, self._known_at)


def own(seconds: float) -> float:
    """That a prompt is given for iterations of which nobody else is part, where nothing else was learned."""
    return min(LEAST * seconds, OWN * seconds + OWN_S)
