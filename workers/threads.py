"""How many threads numba's kernels take: torch's number."""

from __future__ import annotations

import numba
import torch

# OpenMP is the layer that several threads of one process may call at once.
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]


def as_many_threads_as_torch() -> None:
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
