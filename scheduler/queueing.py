"""How much may wait. Each sequence counts: a request for n choices is n of them.

The bounds are for all together. Where they are reached by others, a tenant may still have its share of them waiting, by
weight among the tenants that wait; so at most twice as much waits as the bounds say.
"""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.errors import RequestRefused
from scheduler.line import Line
from scheduler.request import Request


def check_queue(newcomer: Request, waiting: Line, config: SchedulerConfig) -> None:
    """Raises RequestRefused (`queue_full`) for one too many, with the numbers that decide."""
    if len(waiting) >= config.max_queued_requests:
        share = _share(newcomer, waiting) * config.max_queued_requests
        if sum(sequence.request.tenant == newcomer.tenant for sequence in waiting) + 1 > share:
            raise RequestRefused(
                "queue_full", f"{len(waiting)} requests are waiting, the queue's bound; try again later"
            )
    own = len(newcomer.prompt) + len(newcomer.produced)
    queued = waiting.tokens
    if waiting and queued + own > config.max_queued_tokens:
        theirs = sum(len(sequence.tokens) for sequence in waiting if sequence.request.tenant == newcomer.tenant)
        if theirs + own > _share(newcomer, waiting) * config.max_queued_tokens:
            raise RequestRefused(
                "queue_full",
                f"{queued} tokens are waiting to be computed, and {own} more would exceed the queue's bound of "
                f"{config.max_queued_tokens}; try again later",
            )


def _share(newcomer: Request, waiting: Line) -> float:
    """Of the newcomer's tenant; 0 for one who is alone, and has all that there is already."""
    weights = {sequence.request.tenant: sequence.request.weight for sequence in waiting}
    others = sum(weight for tenant, weight in weights.items() if tenant != newcomer.tenant)
    return newcomer.weight / (newcomer.weight + others) if others else 0.0
