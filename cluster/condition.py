"""How the groups of an engine fare, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.loop import IterationLoop
from cluster.routing import takers

_ADDED = (
    "running",
    "waiting",
    "blocks_total",
    "blocks_free",
    "iterations",
    "preemptions",
    "tokens_outstanding",
    "worker_losses",
)


def figures(loops: Sequence[IterationLoop], policy: str) -> dict[str, Any]:
    """`Scheduler.stats` of each loop, and added up; `policy` where there is none yet. `failures` are the reasons of
    those that have given up, `rebuilding` of those that wait for new workers; `given_up` is why no request can be
    served any more, or empty."""
    groups = [loop.scheduler.stats() for loop in loops]
    return {
        "policy": loops[0].scheduler.policy.name if loops else policy,
        **{name: sum(group[name] for group in groups) for name in _ADDED},
        "given_up": "" if takers(loops) else next((loop.failure for loop in loops if loop.failure is not None), ""),
        "failures": [loop.failure for loop in loops if loop.failure is not None],
        "rebuilding": [loop.lost for loop in loops if loop.lost is not None],
        "groups": groups,
    }


def why_not_ready(loops: Sequence[IterationLoop]) -> str:
    """Why a request that came now would be refused, or would have to wait for workers; empty where neither."""
    for role in {loop.scheduler.exchange.role for loop in loops}:
        away = [loop.failure or loop.lost for loop in loops if loop.scheduler.exchange.role == role]
        if all(away):
            return f"no {'worker' if role == 'both' else role} group serves now: {away[0]}"
    return ""
