"""Counts since the beginning, and what became of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from scheduler.blocks import BlockPool
from scheduler.prefixes import Prefixes
from scheduler.swap import HostPool

PreemptionCause = Literal["kv_blocks", "workers_lost"]


@dataclass
class Tally:
    preemptions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(PreemptionCause), 0))
    losses: int = 0
    """Of the workers."""
    violations: int = 0
    """Of conservation, which are bugs."""

    def preempted(self, cause: PreemptionCause) -> None:
        self.preemptions[cause] += 1

    def figures(self, pool: BlockPool, prefixes: Prefixes, host: HostPool) -> dict[str, Any]:
        """`blocks_free` are those that nobody holds, whether something is cached in them or not."""
        return {
            "blocks_total": pool.total,
            "blocks_free": pool.available,
            "blocks": {"free": pool.free, "cached": pool.cached, "referenced": pool.referenced},
            "evictions": pool.evictions,
            "prefix_tokens_queried": prefixes.queried,
            "prefix_tokens_hit": prefixes.hit,
            "preemptions": sum(self.preemptions.values()),
            "preemptions_by_cause": dict(self.preemptions),
            "worker_losses": self.losses,
            "swap_blocks": {"free": host.free, "used": host.total - host.free},
            "swapped_out": host.copied_out,
            "swapped_in": host.copied_in,
            "violations": self.violations,
        }
