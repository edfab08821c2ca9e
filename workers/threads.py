"""What numba's kernels are run by: OpenMP where the system has it, on as many threads as torch takes."""

from __future__ import annotations

import threading

import numba
import torch


def _layer() -> str:
    """OpenMP is the layer that several threads of one process may call at once, and the quickest to begin a region. It
    needs the system's libgomp, which a bare container may lack. numba's own queue is always there, and is enough for a
    worker, which computes on one thread (`workers.compute_thread`)."""
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:
        return "workqueue"
    return "omp"


numba.config.THREADING_LAYER = _layer()  # type: ignore[attr-defined]


class _Told(threading.local):
    threads = 0


_told = _Told()


def as_many_threads_as_torch() -> None:
    """Of the thread that calls. Asked for before each kernel, so that numba is told only what it does not know."""
    threads = torch.get_num_threads()
    if threads != _told.threads:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        _told.threads = threads
