"""Figures of the KV pool: blocks by state, what prefix reuse spared, evictions, preemptions. From `Scheduler.stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

_COUNTS = (
    ("stallfree_prefix_cache_queried_tokens", "Tokens of new requests that were looked up", "prefix_tokens_queried"),
    ("stallfree_prefix_cache_hit_tokens", "Of these, tokens whose KV was reused", "prefix_tokens_hit"),
    ("stallfree_kv_evictions", "Cached KV blocks that were given away", "evictions"),
    ("stallfree_worker_losses", "Times that the workers of a group were lost", "worker_losses"),
    ("stallfree_kv_swapped_out_blocks", "KV blocks copied to host memory", "swapped_out"),
    ("stallfree_kv_swapped_in_blocks", "KV blocks copied back from host memory", "swapped_in"),
    ("stallfree_kv_violations", "Times that KV blocks did not add up: a bug", "violations"),
)


class KvFigures:
    """The schedulers count; `refresh` takes their counts over into Prometheus' counters."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._labels = labels
        self._blocks = Gauge("stallfree_kv_blocks", "KV blocks by state", [*labels, "state"], registry=registry)
        self._swap = Gauge(
            "stallfree_kv_swap_blocks", "Host blocks for swapped KV by state", [*labels, "state"], registry=registry
        )
        self._preemptions = Counter(
            "stallfree_preemptions", "Sequences that gave their blocks up", [*labels, "cause"], registry=registry
        )
        self._counters = {
            key: Counter(name, text, list(labels), registry=registry).labels(**labels) for name, text, key in _COUNTS
        }
        self._told: dict[str, int] = {}

    def refresh(self, groups: Sequence[dict[str, Any]]) -> None:
        """`groups` are what the schedulers say of themselves."""
        for state, blocks in _sums(groups, "blocks").items():
            self._blocks.labels(**self._labels, state=state).set(blocks)
        for state, blocks in _sums(groups, "swap_blocks").items():
            self._swap.labels(**self._labels, state=state).set(blocks)
        for cause, count in _sums(groups, "preemptions_by_cause").items():
            self._preemptions.labels(**self._labels, cause=cause).inc(self._news(cause, count))
        for key, counter in self._counters.items():
            counter.inc(self._news(key, sum(stats[key] for stats in groups)))

    def _news(self, key: str, count: int) -> int:
        """By how much a count has grown; nothing where it has become less, since its scheduler is a new one."""
        grown = count - self._told.get(key, 0)
        self._told[key] = count
        return max(0, grown)


def _sums(groups: Sequence[dict[str, Any]], key: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for stats in groups:
        for name, count in stats[key].items():
            sums[name] = sums.get(name, 0) + count
    return sums
