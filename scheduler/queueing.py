"""How much may wait. Each sequence counts: a request for n choices is n of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler.config import SchedulerConfig
from scheduler.errors import RequestRefused
from scheduler.request import Request, Sequence


def check_queue(newcomer: Request, waiting: Seq[Sequence], config: SchedulerConfig) -> None:
    """Raises RequestRefused (`queue_full`) for one too many, with the numbers that decide."""
    if len(waiting) >= config.max_queued_requests:
        raise RequestRefused("queue_full", f"{len(waiting)} requests are waiting, the queue's bound; try again later")
    own = len(newcomer.prompt) + len(newcomer.produced)
    queued = sum(len(sequence.tokens) for sequence in waiting)
    if waiting and queued + own > config.max_queued_tokens:
        raise RequestRefused(
            "queue_full",
            f"{queued} tokens are waiting to be computed, and {own} more would exceed the queue's bound of "
            f"{config.max_queued_tokens}; try again later",
        )
