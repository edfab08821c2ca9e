"""Which group takes a request."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.loop import IterationLoop


def least_loaded(loops: Sequence[IterationLoop]) -> IterationLoop:
    """The one with the fewest tokens that are still to be computed or generated; the first of several."""
    if len(loops) == 1:
        return loops[0]
    return min(loops, key=lambda loop: loop.scheduler.stats()["tokens_outstanding"])
