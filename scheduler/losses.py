"""Which sequences the workers may have died of."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.progress import InFlight
from scheduler.request import Sequence

MOST_LOSSES = 5
"""So many losses in a row, all of them while it was computed and none with a token of it in between, and a sequence is
not tried again."""


def suspects(running: Iterable[Sequence], under_way: Iterable[InFlight]) -> list[Sequence]:
    """Count this loss of the workers for those that were being computed. Returns those that have seen too many."""
    computed = {request_id for plan in under_way for request_id in plan.computes()}
    found = []
    for sequence in running:
        if sequence.request_id not in computed:
            sequence.losses = 0
            continue
        stuck = len(sequence.tokens) == sequence.length_at_loss
        sequence.losses = sequence.losses + 1 if stuck else 1
        sequence.length_at_loss = len(sequence.tokens)
        if sequence.losses >= MOST_LOSSES:
            found.append(sequence)
    return found
