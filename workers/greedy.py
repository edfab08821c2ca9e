"""The likeliest token of each row, and whether the row's scores are numbers at all, in one pass over the logits."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.threads import as_many_threads_as_torch


def likeliest(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """logits [rows, vocab] -> tokens [rows] (the first of equals), and whether the largest score is finite, [rows].

    A row with a NaN in it is not finite, and may have any token.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return likeliest_torch(logits)
    tokens, finite = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.bool_)
    as_many_threads_as_torch()
    _kernel(logits.contiguous().view(torch.int32).numpy(), tokens, finite)
    return tokens, finite


def likeliest_torch(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The plain path."""
    largest, tokens = logits.float().max(dim=1)
    return tokens.cpu().numpy(), largest.isfinite().cpu().numpy()


def prepare() -> None:
    """Compile the kernel (or load it from numba's cache), so that no request has to wait for that."""
    likeliest(torch.zeros(1, 2))


_PIECE = 1024
_INFINITE = np.int32(0x7F800000)
_ALL_BUT_SIGN = np.int32(0x7FFFFFFF)


def _likeliest(bits: Any, tokens: Any, finite: Any) -> None:
    """The bits of floats, read as integers, are in the floats' order once those of negative ones are turned around. So
    the largest is found by integers, in vectors, which LLVM does not do for floats that may be NaN."""
    rows, vocab = bits.shape
    for i in numba.prange(rows):
        row = bits[i]
        best, piece, farthest = np.int32(-0x80000000), 0, np.int32(0)
        for start in range(0, vocab, _PIECE):
            some = row[start : min(start + _PIECE, vocab)]
            top, far = np.int32(-0x80000000), np.int32(0)
            for t in range(len(some)):  # from 0 on and nothing but two maxima: more LLVM does not make vectors of
                x = some[t]
                far = max(far, x & _ALL_BUT_SIGN)
                top = max(top, x ^ ((x >> np.int32(31)) & _ALL_BUT_SIGN))
            farthest = max(farthest, far)
            if top > best:
                best, piece = top, start
        wanted = best ^ ((best >> np.int32(31)) & _ALL_BUT_SIGN)
        token = piece
        while row[token] != wanted:
            token += 1
        tokens[i] = token
        finite[i] = farthest <= _INFINITE and (wanted & _ALL_BUT_SIGN) < _INFINITE


_kernel: Any = numba.njit(parallel=True, cache=True)(_likeliest)
