"""A live engine's cost model: coefficients fitted to measured iterations, corrected online, with learned quantiles.

    seconds = overhead + smooth_max(read, per_token x tokens; p)
              + per_context x decode contexts + per_sequence x decodes
              + per_pair x chunk pairs + per_chunk_context x chunk contexts + per_chunk x chunks

The form is the roofline's (`scheduler.roofline`); the numbers are the machine's own.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from scheduler.correction import Correction
from scheduler.roofline import Features, smooth_max


class CostModel(Protocol):
    """Seconds that an iteration will take."""

    def predict(self, f: Features) -> float: ...


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: `overhead` an iteration, `read` for the weights, the rest a unit. `norm` is p."""

    overhead: float
    read: float
    per_token: float
    per_context: float
    per_pair: float
    per_sequence: float
    norm: float
    per_chunk_context: float = 0.0
    per_chunk: float = 0.0

    def predict(self, f: Features) -> float:
        linear = smooth_max(self.read, self.per_token * f.tokens, self.norm)
        decodes = self.per_context * f.decode_context + self.per_sequence * f.decodes
        chunks = self.per_pair * f.chunk_pairs + self.per_chunk_context * f.chunk_context + self.per_chunk * f.chunks
        return self.overhead + linear + decodes + chunks

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured iteration."""

    features: Features
    seconds: float


NORMS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


def fit(samples: Sequence[Sample]) -> Coefficients:
    """Coefficients that minimise the squared relative error over the samples, none of them negative.

    For each p the model is linear in its coefficients but for the smooth maximum, which is linearised around the
    present estimate a few times (Gauss-Newton), each step a non-negative least squares by coordinate descent. Raises
    ValueError for too few samples to tell the terms apart.
    """
    if len(samples) < 4 or any(s.seconds <= 0 for s in samples):
        raise ValueError(f"a fit needs at least 4 iterations of positive duration, got {len(samples)}")
    candidates = [_fit_with_norm(samples, norm) for norm in NORMS]
    return min(candidates, key=lambda c: _error(c, samples))


def _error(c: Coefficients, samples: Sequence[Sample]) -> float:
    return sum((c.predict(s.features) / s.seconds - 1) ** 2 for s in samples)


def _fit_with_norm(samples: Sequence[Sample], norm: float) -> Coefficients:
    smallest = min(samples, key=lambda s: s.features.tokens)
    largest = max(samples, key=lambda s: s.features.tokens)
    read, per_token = 0.9 * smallest.seconds, largest.seconds / max(1, largest.features.tokens)
    best = Coefficients(0.0, read, per_token, 0.0, 0.0, 0.0, norm)
    for _ in range(12):
        rows = [_row(s, best, norm) for s in samples]
        x = _nonnegative_least_squares(rows, [1.0] * len(samples), [best.read, best.per_token, 0, 0, 0, 0, 0, 0])
        trial = Coefficients(x[2], x[0], x[1], x[3], x[4], x[5], norm, x[6], x[7])
        if _error(trial, samples) >= _error(best, samples) * (1 - 1e-6):
            break
        best = trial
    return best


def _row(s: Sample, at: Coefficients, norm: float) -> list[float]:
    """The model's derivatives at an estimate, by measured duration: the smooth maximum is homogeneous of degree 1, so
    that it equals its gradient times its arguments."""
    compute = at.per_token * s.features.tokens
    level = smooth_max(at.read, compute, norm)
    d_read = (at.read / level) ** (norm - 1) if level > 0 else 1.0
    d_compute = (compute / level) ** (norm - 1) if level > 0 else 1.0
    f = s.features
    linear = (d_read, d_compute * f.tokens, 1.0)
    attention = (f.decode_context, f.chunk_pairs, f.decodes, f.chunk_context, f.chunks)
    return [term / s.seconds for term in (*linear, *attention)]


def _nonnegative_least_squares(rows: list[list[float]], y: list[float], start: list[float]) -> list[float]:
    """min |rows x - y|^2, x >= 0, by cyclic coordinate descent on columns scaled to unit length."""
    n = len(start)
    scale = [math.sqrt(sum(row[j] ** 2 for row in rows)) or 1.0 for j in range(n)]
    gram = [[sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) for j in range(n)] for i in range(n)]
    target = [sum(r[i] * v for r, v in zip(rows, y, strict=True)) / scale[i] for i in range(n)]
    x = [start[j] * scale[j] for j in range(n)]
    for _ in range(2000):
        moved = 0.0
        for j in range(n):
            if gram[j][j] == 0:
                continue
            gradient = target[j] - sum(gram[j][k] * x[k] for k in range(n))
            new = max(0.0, x[j] + gradient / gram[j][j])
            moved = max(moved, abs(new - x[j]))
            x[j] = new
        if moved < 1e-10:
            break
    return [x[j] / scale[j] for j in range(n)]


FORGOTTEN_S = 10.0
"""Without an iteration, until half of what a slow machine's taught is forgotten."""
ENOUGH = 20
"""Iterations after which it is told how they scatter."""


class Allowance(NamedTuple):
    """By how much an iteration may exceed its prediction. What disturbs iterations makes some of them longer by a
    factor, and others by so many seconds whatever their length; it is seen at the lengths that there were lately.
    Beyond them the smaller of the two is believed, for that corrects itself: what is then planned is seen, too.

    `behind` is what the correction has yet to catch up with.
    """

    ratio: float = 1.0
    excess_s: float = 0.0
    behind: float = 1.0

    def of(self, predicted_s: float) -> float:
        """Seconds that it is within."""
        by_ratio, by_excess = predicted_s * self.ratio, predicted_s + self.excess_s
        return self.behind * (by_ratio if by_ratio <= by_excess else by_excess)


class OnlineCostModel:
    """A base model corrected by what iterations really took.

    What corrects it (`scheduler.correction`) is moved by a bounded step toward each iteration's ratio of actual to
    predicted, so that an outlier (a page fault, a noisy neighbour) moves it no further than a mild surprise does: about
    8 % with the step that is the default (of one with prompts up to 15 %), and a machine that becomes half as fast is
    followed in 9 iterations. How much iterations scatter gives the quantile by which a budget has to allow for those
    that take longer than predicted.
    """

    def __init__(self, base: CostModel, *, step: float = 0.2, limit: float = 4.0, window: int = 400) -> None:
        self.base = base
        self._correction = Correction(step, limit)
        self._plain: tuple[int, int, float] = (-1, -1, 0.0)
        self._scatter: Scatter | None = Scatter(window)
        self._scatter_with_prompts = Scatter(window)
        self._latest: deque[float] = deque(maxlen=5)
        self._allowances: dict[float, Allowance] = {}
        self._busy_until = 0.0

    @property
    def correction(self) -> float:
        """By how much iterations take longer than the base model says, but for prompts."""
        return self._correction.speed

    @property
    def of_prompts(self) -> float:
        """By how much what prompts add to iterations takes longer."""
        return self._correction.speed * self._correction.of_prompts

    def predict(self, f: Features) -> float:
        return self._correction.of(*self._parts(f))

    def _parts(self, f: Features) -> tuple[float, float]:
        """What the base model says of an iteration without its prompts, and of the whole. Of the former it is asked
        once for all that a search for a budget tries."""
        whole = self.base.predict(f)
        if not f.prefill_tokens:
            return whole, whole
        decodes, context, plain = self._plain
        if decodes != f.decodes or context != f.decode_context:
            plain = self.base.predict(Features(decodes=f.decodes, decode_context=f.decode_context))
            self._plain = f.decodes, f.decode_context, plain
        return plain, whole

    def observe(self, f: Features, seconds: float, ended: float = 0.0, starved: bool = False) -> float:
        """Learn from one iteration, that `ended` then. Returns its ratio of actual to predicted (as it was
        predicted). `starved`: it left no room for prompts that there were, so that it tells how those scatter that
        might have had some; else a few that took long would keep prompts out until hundreds had got in.
        """
        self._busy_until = max(self._busy_until, ended)
        plain, whole = self._parts(f)
        predicted = self._correction.of(plain, whole)
        ratio = seconds / predicted
        self._allowances.clear()
        speed = self._correction.speed
        if f.prefill_tokens or starved:
            self._scatter_with_prompts.add(ratio * speed, predicted)
        if self._scatter is not None and len(self._scatter_with_prompts) >= ENOUGH:
            self._scatter = None  # nobody asks for it after that
        if self._scatter is not None:
            self._scatter.add(ratio * speed, predicted)
        self._latest.append(ratio)
        self._correction.learn(plain, whole, seconds)
        return ratio

    def relax(self, now: float) -> None:
        """Where nothing has run since: a machine that was slow is believed to be as it was measured, sooner or later.
        Or who is refused because of it could never find out."""
        idle_s = max(0.0, now - self._busy_until)
        self._busy_until += idle_s
        self._correction.relax(0.5 ** (idle_s / FORGOTTEN_S))

    def allowance(self, quantile: float) -> Allowance:
        """What a share of `quantile` of iterations with prompts is within.

        It is how they scatter, once there are enough to say (20), times what the correction has yet to catch up with:
        the median of the last five ratios. Until then it is how all of them do.
        """
        known = self._allowances.get(quantile)
        if known is None:
            known = self._allowances[quantile] = self._allowance(quantile)
        return known

    def _allowance(self, quantile: float) -> Allowance:
        behind = sorted(self._latest)[len(self._latest) // 2] if self._latest else 1.0
        known = self._scatter_with_prompts if self._scatter is None else self._scatter
        if len(known) < ENOUGH:
            return Allowance(behind=max(1.0, behind))
        ratio, excess_s = known.ratios.quantile(quantile), known.excesses.quantile(quantile)
        return Allowance(max(1.0, ratio), max(0.0, excess_s), max(1.0, behind))


class Scatter:
    """How iterations scatter around the level of the moment: each ratio over the median of the nine around it, and what
    that is in seconds.

    A machine that changes its speed for good moves that median with it, and scatters no more than before: that it did
    so once must not make every budget cautious for hundreds of iterations.
    """

    NEIGHBOURS = 9

    def __init__(self, window: int) -> None:
        self.ratios, self.excesses = Latest(window), Latest(window)
        self._around: deque[tuple[float, float]] = deque(maxlen=self.NEIGHBOURS)

    def __len__(self) -> int:
        return len(self.ratios)

    def add(self, ratio: float, predicted_s: float) -> None:
        self._around.append((ratio, predicted_s))
        if len(self._around) < self.NEIGHBOURS:
            return
        middle = self.NEIGHBOURS // 2
        own, seconds = self._around[middle]
        scattered = own / sorted([ratio for ratio, _ in self._around])[middle]
        self.ratios.add(scattered)
        self.excesses.add((scattered - 1.0) * seconds)


class Latest:
    """The latest of some numbers, in order."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._known: deque[float] = deque()
        self._ordered: array[float] = array("d")  # side by side, since they are compared

    def __len__(self) -> int:
        return len(self._known)

    def add(self, number: float) -> None:
        self._known.append(number)
        insort(self._ordered, number)
        if len(self._known) > self._window:
            oldest = self._known.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]

    def quantile(self, share: float) -> float:
        """What the next one is within, with that probability, as far as those known tell: of n, the rank is taken from
        n + 1 (split conformal prediction), and never the largest, so that a single outlier decides nothing. Raises
        IndexError while nothing is known."""
        n = len(self._ordered)
        rank = min(math.ceil(share * (n + 1)), n - 1)
        return self._ordered[max(1, rank) - 1]
