"""The one thread that a worker loads and computes on.

OpenMP keeps a team of threads for each thread that enters a parallel region. libgomp's teams wait for each other by
turning, which is what makes the hundreds of short regions of a decode cheap, but only as long as the process has no
more OpenMP threads than processors: a second team, left behind by a thread that merely loaded the weights, is enough
for all of them to sleep and be woken in every region.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from workers.processors import name_threads

P = ParamSpec("P")
R = TypeVar("R")


class ComputeThread:
    """Calls run one after another, in the order in which they were given."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "compute", initializer=name_threads)

    def submit(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._executor.submit(call, *args, **kwargs)

    def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the call returns or raises."""
        return self.submit(call, *args, **kwargs).result()

    def close(self) -> None:
        """Returns when the calls given before have ended."""
        self._executor.shutdown(wait=True)
