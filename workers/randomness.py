"""Random numbers that depend on nothing but (seed, choice, position).

A counter-based generator: the three numbers are mixed by SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014), so that no state is kept and neither batch nor rank nor history can matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)


def keys(seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each row, from which its numbers come (`workers.drawing`)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + GOLDEN)
        state = _mix(state ^ (choices + GOLDEN))
        return _mix(state ^ (positions + GOLDEN))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))
