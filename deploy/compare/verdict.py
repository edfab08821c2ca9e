"""Which way to schedule is right for the load: two sentences, from the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.bench.show import duration
from deploy.compare.comparison import Compared, Comparison

KEPT = 0.9
"""Promises that are kept to this share of requests count as kept, as in a search for a capacity."""
TIE = 0.02
"""Shares that differ by no more do not decide anything."""


@dataclass(frozen=True, slots=True)
class Score:
    """Of all loads together: requests that ended and those whose promise was `met`; seconds. `rate`: the highest
    offered rate (requests/s) up to which promises are kept; None where there is one load only."""

    name: str
    met: int
    ended: int
    ttft_p99_s: float | None
    stall_s: float | None
    rate: float | None = None

    @property
    def share(self) -> float:
        return self.met / self.ended if self.ended else 0.0

    def ties_with(self, other: Score) -> bool:
        return self.rate == other.rate and abs(self.share - other.share) <= TIE + 1e-9

    @property
    def keeps(self) -> bool:
        return self.share >= KEPT if self.rate is None else self.rate > 0

    @property
    def rank(self) -> tuple[float, float]:
        return self.rate or 0.0, self.share


def verdict(found: Comparison) -> str:
    """The first sentence says who keeps the promises, the second what that costs."""
    finished = [compared for compared in found.finished if compared.runs]
    if not finished:
        return "No configuration could be run to its end. So there is nothing to compare."
    promised = any(run.figures.attainment is not None for compared in finished for run in compared.runs)
    return said([_score(compared) for compared in finished], promised)


def said(scores: Sequence[Score], promised: bool = True) -> str:
    """See `verdict`. `promised` False: there was no promise to be kept."""
    if len(scores) == 1:
        only = scores[0]
        kept = _kept(only) if promised else f"{only.ended} requests, nothing promised"
        return f"Only {only.name} was run to its end: {kept}. So there is nothing to compare."
    if not promised:
        return f"Nothing was promised, so no configuration is called right. {_extremes(scores)}"
    best = max(scores, key=lambda score: score.rank)
    even = [score for score in scores if score.ties_with(best)]
    second = _price(best, scores) if len(even) == 1 else _extremes(even)
    return f"{_first(best, even, scores)} {second}"


def _first(best: Score, even: Sequence[Score], scores: Sequence[Score]) -> str:
    kept = _kept(best) if len(even) == 1 or _kept(best) == _kept(min(even, key=lambda s: s.share)) else _range(even)
    names = _and([score.name for score in even])
    if not best.met:
        return "No configuration keeps the promises for this load, not to a single request."
    if not best.keeps:
        nearest = f"{names} comes" if len(even) == 1 else f"{names} come, alike,"
        return f"No configuration keeps the promises for this load; {nearest} nearest with {kept}."
    if len(even) == len(scores):
        return f"All configurations keep the promises equally well: {kept}."
    against = f"{kept}, against {_others([score for score in scores if score not in even])}"
    if len(even) > 1:
        return f"{names} keep the promises equally well: {against}."
    return f"{best.name} is right for this load: {against}."


def _others(others: Sequence[Score]) -> str:
    """The next best, and the worst where that is another."""
    following, worst = max(others, key=lambda score: score.rank), min(others, key=lambda score: score.rank)
    next_best = f"{_kept(following, shortly=True)} under {following.name}"
    if following is worst:
        return next_best
    return f"{next_best}, the next best, and {_kept(worst, shortly=True)} under {worst.name}, the worst"


def _extremes(scores: Sequence[Score]) -> str:
    """Of those that are even: who is first and who stalls least, which is often not the same."""
    quick, calm = min(scores, key=_ttft), min(scores, key=_stall)
    if quick is calm:
        return (
            f"Of these {quick.name} has both the shortest P99 TTFT, {duration(quick.ttft_p99_s)}, and the shortest "
            f"stall, {duration(quick.stall_s)}."
        )
    return (
        f"Of these {quick.name} has the shortest P99 TTFT, {duration(quick.ttft_p99_s)} with stalls of up to "
        f"{duration(quick.stall_s)}, and {calm.name} the shortest stall, {duration(calm.stall_s)} with a P99 TTFT of "
        f"{duration(calm.ttft_p99_s)}."
    )


def _price(best: Score, scores: Sequence[Score]) -> str:
    """Its largest stall beside the longest of the others, its TTFT beside the shortest of them."""
    others = [score for score in scores if score is not best]
    stalled, quick = max(others, key=_stall), min(others, key=_ttft)
    longer = " and is the longest of all" if _stall(best) > _stall(stalled) else ""
    stall = f"Its largest stall is {duration(best.stall_s)}{longer} ({duration(stalled.stall_s)} under {stalled.name})"
    sooner = _ttft(best) < _ttft(quick)
    place = (
        f"{'the shortest of all' if sooner else 'not the shortest'} ({duration(quick.ttft_p99_s)} under {quick.name})"
    )
    return f"{stall}; its P99 TTFT, {duration(best.ttft_p99_s)}, is {place}."


def _range(even: Sequence[Score]) -> str:
    """Where those that are even had not quite the same."""
    counts = [score.met for score in even]
    return f"{min(counts)} to {max(counts)} of {even[0].ended} requests as promised"


def _kept(score: Score, shortly: bool = False) -> str:
    told = str(score.met) if shortly else f"{score.met} of {score.ended} requests as promised"
    if score.rate is None:
        return told
    return f"{told} and {KEPT:.0%} or more of them " + (
        f"up to {score.rate:.3g} a second" if score.rate else "at no rate"
    )


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _stall(score: Score) -> float:
    return score.stall_s if score.stall_s is not None else 0.0


def _ttft(score: Score) -> float:
    return score.ttft_p99_s if score.ttft_p99_s is not None else math.inf


def _score(compared: Compared) -> Score:
    runs = compared.runs
    figures = [run.figures for run in runs]
    offered = [(run.load.offered_per_s or 0.0, run.figures.attainment or 0.0) for run in runs]
    holding: float | None = None
    if len(runs) > 1:
        holding = 0.0
        for rate, share in sorted(offered):
            if share < KEPT:
                break
            holding = rate
    return Score(
        name=compared.name,
        met=sum(found.met for found in figures),
        ended=sum(found.finished + found.failed for found in figures),
        ttft_p99_s=max((found.ttft.p99 for found in figures if found.ttft.p99 is not None), default=None),
        stall_s=max((found.largest_stall_s for found in figures if found.largest_stall_s is not None), default=None),
        rate=holding,
    )
