"""Figures of a running engine, kept where the iterations happen and told in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.attainment import Attainment
from cluster.kv_figures import KvFigures
from cluster.loop import PROBE_PREFIX, IterationRecord
from scheduler.costmodel import OnlineCostModel
from scheduler.progress import Served, TokenTiming
from scheduler.request import Delta

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_GAP = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 20)
_RATIO = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineMetrics:
    """Latencies, iterations, tokens and promises as they happen; queues and blocks when asked. Times are seconds."""

    def __init__(self, model: str, classes: Iterable[str] = ()) -> None:
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
        self._tpot = histogram("stallfree_time_per_output_token_seconds", "Mean gap of one request", _GAP)
        self._queue = histogram("stallfree_request_queue_seconds", "Arrival to the request's first iteration", _TTFT)
        self._latency = histogram("stallfree_request_latency_seconds", "Arrival to last token", _TTFT)
        self._iteration = histogram("stallfree_iteration_seconds", "Plan made to result committed", _GAP)
        self._chunk = histogram("stallfree_iteration_prefill_tokens", "Prompt tokens of an iteration", _TOKENS)
        self._budget = histogram("stallfree_iteration_token_budget", "Prompt tokens it was allowed", _TOKENS)
        self._bounds = counter("stallfree_iterations", "Iterations by what bound their budget", "bound")
        self._error = histogram(
            "stallfree_prediction_error_ratio", "|actual over predicted duration - 1| of an iteration", _RATIO
        )
        self._forecast = histogram(
            "stallfree_ttft_forecast_error_ratio", "|actual over predicted TTFT - 1|, predicted at admission", _RATIO
        )
        self._batch = histogram("stallfree_iteration_decodes", "Streams that an iteration carries", _TOKENS)
        self._prompt_tokens = counter("stallfree_prompt_tokens", "Prompt tokens computed")
        self._tokens = counter("stallfree_generation_tokens", "Tokens generated")
        self._finished = counter("stallfree_requests_finished", "Requests by how they ended", "finish")
        self._kv = KvFigures(self.registry, labels)
        self._attainment = Attainment(self.registry, labels, classes)
        self._queued: set[str] = set()
        self._gauges = {
            name: gauge(f"stallfree_{name}", text)
            for name, text in (
                ("requests_running", "Sequences that hold a slot"),
                ("requests_waiting", "Sequences that wait for a slot or blocks"),
                ("kv_blocks_free", "KV blocks nobody holds"),
                ("kv_blocks_total", "KV blocks of all groups"),
                ("kv_usage_ratio", "Share of the KV blocks that somebody holds"),
                ("prediction_correction", "Factor by which iterations take longer than the fitted model says"),
                ("prompts_correction", "Factor by which what prompts add to iterations takes longer than it says"),
            )
        }

    def observe(self, record: IterationRecord) -> None:
        """Count one iteration."""
        self._iteration.observe(record.actual_s)
        self._observe_decision(record)
        self._observe_queue(record)
        self._chunk.observe(record.prefill_tokens)
        self._batch.observe(record.decodes)
        self._prompt_tokens.inc(record.prefill_tokens)
        for sequences, gap_s in record.timings.together:
            for _ in sequences:
                self._gap.observe(gap_s)
        for timing in record.timings.others:
            if not timing.request_id.startswith(PROBE_PREFIX):
                self._observe_timing(timing)
        self.observe_ends(record.deltas, record.served)

    def observe_ends(self, deltas: Iterable[Delta], served: Iterable[Served]) -> None:
        """Count tokens, and requests that ended, whether an iteration ended them or not."""
        for delta in deltas:
            if delta.request_id.startswith(PROBE_PREFIX):
                continue
            self._tokens.inc(len(delta.tokens))
            if delta.finish is not None:
                self._queued.discard(delta.request_id)
                self._finished.labels(**self._labels, finish=delta.finish.value).inc()
        for request in served:
            if not request.request_id.startswith(PROBE_PREFIX):
                self._observe_served(request)

    def _observe_timing(self, timing: TokenTiming) -> None:
        if timing.gap_s is not None:
            self._gap.observe(timing.gap_s)
        if timing.since_arrival_s is not None:
            if timing.gap_s is None:
                self._ttft.observe(timing.since_arrival_s)
            if timing.last:
                self._latency.observe(timing.since_arrival_s)

    def _observe_decision(self, record: IterationRecord) -> None:
        decision = record.under_way.decision
        self._bounds.labels(**self._labels, bound=decision.bound).inc()
        if decision.bound != "none":
            self._budget.observe(decision.token_budget)
        if record.predicted_s:
            self._error.observe(abs(record.actual_s / record.predicted_s - 1))

    def _observe_queue(self, record: IterationRecord) -> None:
        """A request that starts over after a preemption has waited before, which counts as none of this."""
        for chunk in record.under_way.chunks:
            if chunk.request_id not in self._queued and not chunk.request_id.startswith(PROBE_PREFIX):
                self._queued.add(chunk.request_id)
                self._queue.observe(record.started - chunk.arrival)

    def _observe_served(self, served: Served) -> None:
        self._attainment.observe(served)
        if served.outcome.tpot_s is not None:
            self._tpot.observe(served.outcome.tpot_s)
        if served.predicted_ttft_s:
            self._forecast.observe(abs(served.outcome.ttft_s / served.predicted_ttft_s - 1))

    def expose(self, groups: Sequence[dict[str, Any]], cost: OnlineCostModel | None = None) -> bytes:
        """Prometheus text, with each group's scheduler figures (`Scheduler.stats`) added up, and what the cost model is
        corrected by, if there is one."""
        total, free = (sum(stats[key] for stats in groups) for key in ("blocks_total", "blocks_free"))
        self._gauges["kv_usage_ratio"].set(1 - free / total if total else 0.0)
        self._gauges["prediction_correction"].set(1.0 if cost is None else cost.correction)
        self._gauges["prompts_correction"].set(1.0 if cost is None else cost.of_prompts)
        self._attainment.refresh()
        self._kv.refresh(groups)
        for gauge, key in (
            ("requests_running", "running"),
            ("requests_waiting", "waiting"),
            ("kv_blocks_free", "blocks_free"),
            ("kv_blocks_total", "blocks_total"),
        ):
            self._gauges[gauge].set(sum(stats[key] for stats in groups))
        return generate_latest(self.registry)
