"""The dual-SLO solver: which chunk sizes keep both promises, or what stands in the way and the nearest ways out.

A prompt of s_p tokens is prefilled in chunks of c among b decodes of mean context s_bar. TPOT bounds the longest
iteration; TTFT is the sum of the iterations that the prompt takes, plus the wait for earlier prompts at a given rate of
arrival. Everything is asked of one cost model, so that the answer is what stepping the iterations would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
            raise ValueError(
                f"not a load: {self.rate} prompts of {self.prompt} tokens a second among {self.decodes} decodes "
                f"of context {self.context}"
            )


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
    """`chunk_range` is the smallest and the largest chunk that keep both promises, None where none does; `chunk` the
    one to take (the largest, for throughput; the nearest miss where infeasible). `binding` names the promise that
    fails, and is empty where both are kept."""

    feasible: bool
    chunk: int
    chunk_range: tuple[int, int] | None
    iteration_s: float
    ttft_s: float
    tpot_s: float
    binding: str


class Solver:
    """Asks one cost model. `cap` bounds a chunk, besides the prompt's length; `tile` is the granularity of the matrix
    kernels, at whose multiples costs step."""

    __slots__ = ("cap", "cost", "tile")

    def __init__(self, cost: CostModel, cap: int = 1 << 16, tile: int = 1) -> None:
        self.cost = cost
        self.cap = cap
        self.tile = tile

    # What a chunk size gives.

    def iterations(self, load: Load, chunk: int) -> Iterator[float]:
        """Seconds of each iteration that a prompt takes in chunks of `chunk`, all decodes along."""
        decodes = self._decodes(load)
        for start in range(0, load.prompt, chunk):
            yield self.cost.predict(decodes.with_chunk(start, min(chunk, load.prompt - start)))

    def tpot(self, load: Load, chunk: int) -> float:
        """The longest iteration that prefilling such prompts in chunks of `chunk` can cause: a full chunk that ends
        with the prompt. It grows with the chunk."""
        count = min(chunk, load.prompt)
        return self.cost.predict(self._decodes(load).with_chunk(load.prompt - count, count))

    def step(self, load: Load) -> float:
        """Seconds of an iteration of the decodes alone."""
        return self.cost.predict(self._decodes(load))

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
        c_max = self.largest_chunk(load, targets.tpot_s)
        if c_max == 0:
            return self._verdict(load, 1, None, "tpot")
        sizes = self._candidates(load, c_max, targets.ttft_s)
        kept = [chunk for chunk in sizes if self.ttft(load, chunk) <= targets.ttft_s]
        if kept:
            chunk = max(kept)
            return self._verdict(load, chunk, (self._c_min(load, targets, sizes, min(kept)), chunk), "")
        return self._verdict(load, min(sizes, key=lambda c: self.ttft(load, c), default=c_max), None, "ttft")

    def largest_chunk(self, load: Load, tpot_s: float) -> int:
        """The largest chunk that keeps TPOT; 0 where not even one token does."""
        return largest(lambda c: c == 0 or self.tpot(load, c) <= tpot_s, min(load.prompt, self.cap))

    def _c_min(self, load: Load, targets: Targets, sizes: list[int], kept: int) -> int:
        """The smallest chunk that keeps TTFT, between the smallest candidate that does and the one below it."""
        below = max((size for size in sizes if size < kept), default=0)
        return smallest(lambda c: self.ttft(load, c) <= targets.ttft_s, below + 1, kept)

    def _candidates(self, load: Load, c_max: int, ttft_s: float = math.inf) -> list[int]:
        """Ascending chunk sizes up to c_max of which one has the least TTFT: for each number of chunks the most even
        split, whole tiles, and c_max. Sizes with so many chunks that no TTFT of `ttft_s` is possible are left out."""
        shortest = self.cost.predict(self._decodes(load).with_chunk(0, 1))
        most = min(load.prompt, int(ttft_s / shortest) + 1 if ttft_s < math.inf else load.prompt)
        sizes = {c_max}
        chunks = math.ceil(load.prompt / c_max)
        while chunks <= most:
            size = math.ceil(load.prompt / chunks)
            sizes.add(size)
            if size == 1:
                break
            chunks = max(chunks + 1, math.ceil(load.prompt / (size - 1)))  # the next count that needs another size
        if self.tile > 1:
            sizes.update(range(self.tile, c_max + 1, self.tile))
        return sorted(size for size in sizes if size <= c_max)

    def _verdict(self, load: Load, chunk: int, chunk_range: tuple[int, int] | None, failing: str) -> Verdict:
        iteration, ttft = self.tpot(load, chunk), self.ttft(load, chunk)
        return Verdict(chunk_range is not None, chunk, chunk_range, iteration, ttft, iteration, failing)

    # Ways out.

    def feasible(self, load: Load, targets: Targets) -> bool:
        return self.solve(load, targets).feasible

    def relaxed_tpot(self, load: Load, targets: Targets) -> float | None:
        """The smallest TPOT at which TTFT can be kept as it is; None where none is large enough."""
        sizes = self._candidates(load, min(load.prompt, self.cap), targets.ttft_s)
        kept = [chunk for chunk in sizes if self.ttft(load, chunk) <= targets.ttft_s]
        return self.tpot(load, self._c_min(load, targets, sizes, min(kept))) if kept else None

    def relaxed_ttft(self, load: Load, targets: Targets) -> float | None:
        """The smallest TTFT at which TPOT can be kept as it is; None where no chunk does or the queue has no end."""
        c_max = self.largest_chunk(load, targets.tpot_s)
        if c_max == 0:
            return None
        best = min(self.ttft(load, chunk) for chunk in self._candidates(load, c_max))
        return best if best < math.inf else None

    def most_decodes(self, load: Load, targets: Targets) -> int | None:
        """The largest number of decodes with which both promises can be kept; None where not even none helps."""

        def holds(decodes: int) -> bool:
            return self.feasible(replace(load, decodes=decodes), targets)

        return largest(holds, UNBOUNDED) if holds(0) else None

    def _decodes(self, load: Load) -> Features:
        return Features(decodes=load.decodes, decode_context=load.decodes * load.context)
