"""Log-probabilities of the tokens of a prompt, from the same forward that computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.request import TokenLogprob
from workers.sampler import token_logprobs

MOST_ROWS = 64
"""Whose logits are there at once: a row is as long as the vocabulary."""


def score(
    logits_of: Callable[[Tensor], Tensor],
    first_row: int,
    following: NDArray[np.int32],
    alternatives: int,
    most_rows: int = MOST_ROWS,
) -> tuple[TokenLogprob, ...]:
    """Of the tokens `following` the rows first_row, first_row + 1 ... of a forward, one for each, with so many
    likeliest alternatives. `logits_of` gives the logits [rows, vocab] of some rows, `most_rows` at a time."""
    found: list[TokenLogprob] = []
    for begin in range(0, len(following), most_rows):
        part = following[begin : begin + most_rows].astype(np.int64)
        rows = torch.arange(first_row + begin, first_row + begin + len(part))
        found += token_logprobs(logits_of(rows).float(), part, [alternatives] * len(part))
    return tuple(found)
