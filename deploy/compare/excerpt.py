"""The few requests of a run that are drawn token by token: the same ones under each configuration."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.bench.record import RequestRecord

FEW = 12
LONGEST_WINDOW = 3.0
"""Times what the quickest configuration needs: one that takes longer is cut off rather than pressing all the others
into a corner."""


def excerpt(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Neighbours, so that they meet, and among them the longest prompt, since it is what others have to wait for."""
    ordered = sorted(records, key=lambda record: record.due_s)
    if len(ordered) <= FEW:
        return ordered
    longest = max(range(len(ordered)), key=lambda index: ordered[index].prompt_tokens or 0)
    first = min(max(0, longest - FEW // 2), len(ordered) - FEW)
    return ordered[first : first + FEW]


def window(excerpts: Sequence[Sequence[RequestRecord]]) -> tuple[float, float]:
    """From when to when (seconds of the run) they are drawn, one under another: each with all of its tokens, unless it
    takes a multiple of what the quickest one does."""
    ends = [max(record.ended_s for record in chosen) for chosen in excerpts if chosen]
    if not ends:
        return 0.0, 1.0
    start = min(record.sent_s for chosen in excerpts for record in chosen)
    # From the beginning of the run where that is near.
    start = 0.0 if start < min(ends) - start else start
    return start, min(max(ends), start + LONGEST_WINDOW * (min(ends) - start))
