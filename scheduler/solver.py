"""The dual-SLO solver: which chunk sizes keep both promises, or what stands in the way and the nearest ways out.

A prompt of s_p tokens is prefilled in chunks of c among b decodes of mean context s_bar. TPOT bounds the longest
iteration; TTFT is the sum of the iterations that the prompt takes, plus the wait for earlier prompts at a given rate of
arrival. Everything is asked of one cost model, so that the answer is what stepping the iterations would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.costmodel import CostModel
from scheduler.roofline import Features
from scheduler.search import largest, smallest

UNBOUNDED = 1 << 20
"""Where a search for a number of decodes ends: nobody runs more in one batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one group carries: prompts of `prompt` tokens among `decodes` streams of mean context `context`, prompts
    arriving at `rate` a second (0: one at a time, no queue). Raises ValueError for what is no load."""

    prompt: int
    decodes: int
    context: int
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.decodes < 0 or self.context < 0 or not 0 <= self.rate < math.inf:
            raise ValueError(f"not a load: {self}")


@dataclass(frozen=True, slots=True)
class Targets:
    """TTFT and TPOT in seconds. Raises ValueError for what is no time."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft_s < math.inf and 0 < self.tpot_s < math.inf):
            raise ValueError(f"TTFT and TPOT must be above 0, got {self.ttft_s} s and {self.tpot_s} s")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`chunk_range` are the smallest and the largest chunk that keep both promises, None where none does; `chunk` the
    one to take (the largest, for throughput; the best compromise where infeasible). `binding` names the promise that
    fails, or the one that is met with less to spare."""

    feasible: bool
    chunk: int
    chunk_range: tuple[int, int] | None
    iteration_s: float
    ttft_s: float
    tpot_s: float
    binding: str


class Solver:
    """Asks one cost model. `cap` bounds a chunk, besides the prompt's length."""

    def __init__(self, cost: CostModel, cap: int = 1 << 16) -> None:
        self.cost = cost
        self.cap = cap

    # What a chunk size gives.

    def iterations(self, load: Load, chunk: int) -> Iterator[float]:
        """Seconds of each iteration that a prompt takes in chunks of `chunk`, all decodes along."""
        decodes = self._decodes(load)
        for start in range(0, load.prompt, chunk):
            yield self.cost.predict(decodes.with_chunk(start, min(chunk, load.prompt - start)))

    def tpot(self, load: Load, chunk: int) -> float:
        """The longest iteration that a stream sees while a prompt is prefilled in chunks of `chunk`: a full chunk at
        the prompt's end (or, where the last chunk is short, whichever of the last two takes longer)."""
        last = load.prompt % chunk or min(chunk, load.prompt)
        candidates = [(load.prompt - last, last)]
        if load.prompt - last >= chunk:
            candidates.append((load.prompt - last - chunk, chunk))
        decodes = self._decodes(load)
        return max(self.cost.predict(decodes.with_chunk(start, count)) for start, count in candidates)

    def prefill(self, load: Load, chunk: int) -> float:
        """Seconds from a prompt's first iteration to its first token."""
        return sum(self.iterations(load, chunk))

    def ttft(self, load: Load, chunk: int) -> float:
        """`prefill` and the expected wait for the prompts before it: an M/D/1 queue, rho S / (2 (1 - rho)); infinite
        where prompts arrive faster than they are prefilled. Kleinrock, Queueing Systems I (1975)."""
        service = self.prefill(load, chunk)
        rho = load.rate * service
        return math.inf if rho >= 1 else service + rho * service / (2 * (1 - rho))

    # The verdict.

    def solve(self, load: Load, targets: Targets) -> Verdict:
        """Which chunk sizes keep both promises; where none does, which promise stands in the way."""
        top = min(load.prompt, self.cap)
        if self.tpot(load, 1) > targets.tpot_s:
            return self._verdict(load, targets, 1, None, "tpot")
        c_max = largest(lambda chunk: self.tpot(load, chunk) <= targets.tpot_s, top, low=1)
        kept = [c for c in self._candidates(load, c_max) if self.ttft(load, c) <= targets.ttft_s]
        if kept:
            c_min = self._smallest_kept(load, targets, kept)
            return self._verdict(load, targets, max(kept), (c_min, max(kept)), self._tighter(load, targets, max(kept)))
        best = min(self._candidates(load, c_max), key=lambda c: self.ttft(load, c))
        return self._verdict(load, targets, best, None, "ttft")

    def _candidates(self, load: Load, c_max: int) -> list[int]:
        """Chunk sizes up to c_max that can be best: c_max itself and, for each number of chunks, the smallest size that
        needs no more of them (what a larger one with as many chunks gives is no shorter)."""
        sizes = {c_max}
        count = math.ceil(load.prompt / c_max)
        while len(sizes) < 512 and count <= load.prompt:
            sizes.add(math.ceil(load.prompt / count))
            count += max(1, count // 64)
        return sorted(size for size in sizes if size <= c_max)

    def _smallest_kept(self, load: Load, targets: Targets, kept: list[int]) -> int:
        """The smallest size from which on TTFT holds, searched below the smallest candidate that keeps it."""
        return smallest(lambda c: self.ttft(load, c) <= targets.ttft_s, 1, min(kept))

    def _verdict(
        self, load: Load, targets: Targets, chunk: int, chunk_range: tuple[int, int] | None, binding: str
    ) -> Verdict:
        iteration = self.tpot(load, chunk)
        return Verdict(
            feasible=chunk_range is not None,
            chunk=chunk,
            chunk_range=chunk_range,
            iteration_s=iteration,
            ttft_s=self.ttft(load, chunk),
            tpot_s=iteration,
            binding=binding,
        )

    def _tighter(self, load: Load, targets: Targets, chunk: int) -> str:
        return "tpot" if self.tpot(load, chunk) / targets.tpot_s >= self.ttft(load, chunk) / targets.ttft_s else "ttft"

    # Ways out.

    def feasible(self, load: Load, targets: Targets) -> bool:
        return self.solve(load, targets).feasible

    def relaxed_tpot(self, load: Load, targets: Targets) -> float | None:
        """The smallest TPOT at which TTFT can be kept as it is; None where none is large enough."""
        sizes = self._candidates(load, min(load.prompt, self.cap))
        return min((self.tpot(load, c) for c in sizes if self.ttft(load, c) <= targets.ttft_s), default=None)

    def relaxed_ttft(self, load: Load, targets: Targets) -> float | None:
        """The smallest TTFT at which TPOT can be kept as it is; None where no chunk keeps TPOT."""
        if self.tpot(load, 1) > targets.tpot_s:
            return None
        top = min(load.prompt, self.cap)
        c_max = largest(lambda chunk: self.tpot(load, chunk) <= targets.tpot_s, top, low=1)
        best = min(self.ttft(load, c) for c in self._candidates(load, c_max))
        return None if math.isinf(best) else best

    def most_decodes(self, load: Load, targets: Targets) -> int | None:
        """The largest number of decodes with which both promises can be kept; None where not even none helps."""

        def holds(decodes: int) -> bool:
            return self.feasible(replace(load, decodes=decodes), targets)

        return largest(holds, UNBOUNDED) if holds(0) else None

    def _decodes(self, load: Load) -> Features:
        return Features(decodes=load.decodes, decode_context=load.decodes * load.context)


def smallest_degree(degrees: list[int], holds: Callable[[int], bool]) -> int | None:
    """The first of the (ascending) tensor-parallel degrees that holds."""
    return next((degree for degree in degrees if holds(degree)), None)
