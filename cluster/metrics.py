"""Figures of a running engine, kept where the iterations happen and told in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.loop import PROBE_PREFIX, IterationRecord

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_GAP = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineMetrics:
    """TTFT, gaps, iterations and tokens as they happen; queues and blocks when asked. Times are seconds."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, list(labels), buckets=buckets, registry=self.registry).labels(**labels)

        def counter(name: str, text: str, *more: str) -> Counter:
            made = Counter(name, text, [*labels, *more], registry=self.registry)
            return made if more else made.labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, list(labels), registry=self.registry).labels(**labels)

        self._labels = labels
        self._ttft = histogram("stallfree_time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self._gap = histogram("stallfree_inter_token_latency_seconds", "Gap between two tokens of a stream", _GAP)
        self._latency = histogram("stallfree_request_latency_seconds", "Arrival to last token", _TTFT)
        self._iteration = histogram("stallfree_iteration_seconds", "Plan made to result committed", _GAP)
        self._chunk = histogram("stallfree_iteration_prefill_tokens", "Prompt tokens of an iteration", _TOKENS)
        self._batch = histogram("stallfree_iteration_decodes", "Streams that an iteration carries", _TOKENS)
        self._prompt_tokens = counter("stallfree_prompt_tokens", "Prompt tokens computed")
        self._tokens = counter("stallfree_generation_tokens", "Tokens generated")
        self._finished = counter("stallfree_requests_finished", "Requests by how they ended", "finish")
        self._gauges = {
            name: gauge(f"stallfree_{name}", text)
            for name, text in (
                ("requests_running", "Sequences that hold a slot"),
                ("requests_waiting", "Sequences that wait for a slot or blocks"),
                ("kv_blocks_free", "KV blocks nobody holds"),
                ("kv_blocks_total", "KV blocks of all groups"),
                ("preemptions", "Sequences that gave their blocks up, so far"),
            )
        }

    def observe(self, record: IterationRecord) -> None:
        """Count one iteration."""
        self._iteration.observe(record.ended - record.started)
        self._chunk.observe(record.prefill_tokens)
        self._batch.observe(record.decodes)
        self._prompt_tokens.inc(record.prefill_tokens)
        for delta in record.deltas:
            if delta.request_id.startswith(PROBE_PREFIX):
                continue
            self._tokens.inc(len(delta.tokens))
            if delta.finish is not None:
                self._finished.labels(**self._labels, finish=delta.finish.value).inc()
        for timing in record.timings:
            if timing.gap_s is None:
                self._ttft.observe(timing.since_arrival_s)
            else:
                self._gap.observe(timing.gap_s)
            if timing.last:
                self._latency.observe(timing.since_arrival_s)

    def expose(self, groups: Sequence[dict[str, Any]]) -> bytes:
        """Prometheus text, with each group's scheduler figures (`Scheduler.stats`) added up."""
        for gauge, key in (
            ("requests_running", "running"),
            ("requests_waiting", "waiting"),
            ("kv_blocks_free", "blocks_free"),
            ("kv_blocks_total", "blocks_total"),
            ("preemptions", "preemptions"),
        ):
            self._gauges[gauge].set(sum(stats[key] for stats in groups))
        return generate_latest(self.registry)
