"""One token of each row, drawn by its own probabilities: argmax of score / temperature + Gumbel noise.

The noise of a token is keyed by (seed, choice, position, token), so that it is the same whatever the batch, the rank or
the history. Rounding of the scores, which does depend on the shape of the batch, changes the outcome only where the two
best sums are as close as the rounding itself; a number held against a running sum of probabilities would feel it at
every one of a vocabulary's boundaries, tens of thousands of times as often. That the argmax is distributed as the
softmax: Gumbel, Statistical Theory of Extreme Values, 1954.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.randomness import FIRST, GOLDEN, SECOND
from workers.threads import as_many_threads_as_torch

REACH = 8.0
"""A token that is further below the best one's sum than this is looked at only where its noise is that large."""


def draw(logits: Tensor, temperatures: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    """logits [rows, vocab] (-inf: not to be drawn), temperatures [rows, 1] in float64, a key for each row -> [rows]."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return draw_torch(logits, temperatures, keys)
    drawn = torch.empty(logits.shape[0], dtype=torch.int64)
    as_many_threads_as_torch()
    _kernel(logits.contiguous().numpy(), temperatures.flatten().numpy(), keys, drawn.numpy())
    return drawn


def prepare() -> None:
    """Compile the kernel (or load it from numba's cache), so that no request has to wait for that."""
    draw(torch.zeros(1, 2), torch.ones(1, 1, dtype=torch.float64), np.zeros(1, dtype=np.uint64))


def draw_torch(logits: Tensor, temperatures: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    """The plain path."""
    # The largest is subtracted before dividing: a tiny temperature then gives -inf, not inf - inf.
    scores = logits.double()
    scores = (scores - scores.max(dim=1, keepdim=True).values) / temperatures
    uniform = _noise(torch.from_numpy(keys.astype(np.int64)).to(scores.device), scores.shape[1])
    best = scores.argmax(dim=1, keepdim=True)
    to_beat = _gumbel(uniform.gather(1, best))  # the best one's score is 0
    # Whoever is left out has a score of at most to_beat - REACH and a noise of at most REACH.
    candidates = (scores > to_beat - REACH) | ((uniform > math.exp(-math.exp(-REACH))) & (scores > -math.inf))
    rows, tokens = candidates.nonzero(as_tuple=True)
    sums = scores[rows, tokens] + _gumbel(uniform[rows, tokens])
    highest = torch.full_like(to_beat.squeeze(1), -math.inf).scatter_reduce(0, rows, sums, "amax")
    winning = sums >= highest[rows]
    last = scores.shape[1] - 1  # where a row's scores are not numbers, any token will do
    drawn = torch.full((scores.shape[0],), last, dtype=torch.int64, device=scores.device)
    return drawn.scatter_reduce(0, rows[winning], tokens[winning], "amin")


def _gumbel(uniform: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform))


def _noise(keys: Tensor, vocab: int) -> Tensor:
    """keys [rows], 64 bits each -> numbers in (0, 1) [rows, vocab]: SplitMix64's stream from each key."""
    steps = torch.arange(1, vocab + 1, device=keys.device) * _signed(GOLDEN)
    x = keys.unsqueeze(1) + steps
    x = (x ^ _shifted(x, 30)).mul_(_signed(FIRST))
    x = (x ^ _shifted(x, 27)).mul_(_signed(SECOND))
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() + 0.5).mul_(2.0**-53)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch has no unsigned 64-bit arithmetic."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: np.uint64) -> int:
    return int(value.astype(np.int64))


_ROOM = math.exp(-math.exp(-REACH))
_UNIT = 2.0**-53


def _draw(logits: Any, temperatures: Any, keys: Any, drawn: Any) -> None:
    """The same for each row in one pass: what torch needs a dozen for."""
    rows, vocab = logits.shape
    for i in numba.prange(rows):
        row = logits[i]
        best = 0
        for t in range(vocab):
            if row[t] > row[best]:
                best = t
        highest, temperature, state, chosen = np.float64(row[best]), temperatures[i], keys[i], best
        least, to_beat = -np.inf, -np.inf
        for turn in range(2):  # the likeliest token alone, which says who else can win; then everybody
            for t in range(best if turn == 0 else 0, best + 1 if turn == 0 else vocab):
                x = state + np.uint64(t + 1) * GOLDEN
                x = (x ^ (x >> np.uint64(30))) * FIRST
                x = (x ^ (x >> np.uint64(27))) * SECOND
                x = x ^ (x >> np.uint64(31))
                uniform = (np.float64(x >> np.uint64(11)) + 0.5) * _UNIT
                score = (np.float64(row[t]) - highest) / temperature
                if score > least or (uniform > _ROOM and score > -np.inf):
                    found = score - math.log(-math.log(uniform))
                    if found > to_beat or (found == to_beat and t < chosen):
                        to_beat, chosen = found, t
            least = to_beat - REACH
        drawn[i] = chosen


_kernel: Any = numba.njit(parallel=True, cache=True, error_model="numpy")(_draw)
