"""Promises kept, by class: counters since the start, attainment and goodput of the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from scheduler.progress import Served
from scheduler.slo import OWN_CLASSES, Outcome

WINDOW_S = 60.0


class Attainment:
    """Of requests that ended as they should; `best_effort` are those whose promise was given up at admission."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: dict[str, str],
        classes: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [*labels, "slo_class"]
        self._clock = clock
        self._started = clock()
        self._labels = labels
        self._recent: deque[tuple[float, str, bool]] = deque()
        self._classes = sorted({*OWN_CLASSES, *classes})
        self._requests = Counter(
            "stallfree_slo_requests",
            "Requests by class and by which of their promises were kept",
            [*names, "result"],
            registry=registry,
        )
        self._attainment = Gauge(
            "stallfree_slo_attainment",
            "Share of the requests that ended in the last minute which kept all promises; NaN where none ended",
            names,
            registry=registry,
        )
        self._goodput = Gauge(
            "stallfree_goodput_requests_per_second",
            "Requests per second of the last minute that kept all promises",
            names,
            registry=registry,
        )

    def observe(self, served: Served) -> None:
        self._requests.labels(**self._labels, slo_class=served.slo_class, result=_result(served.outcome)).inc()
        self._recent.append((self._clock(), served.slo_class, served.outcome.met))

    def refresh(self) -> None:
        """Set the gauges to what they are now."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        span = max(1e-9, min(WINDOW_S, now - self._started))
        for name in self._classes:
            met = [kept for _, slo_class, kept in self._recent if slo_class == name]
            labels = {**self._labels, "slo_class": name}
            self._attainment.labels(**labels).set(sum(met) / len(met) if met else float("nan"))
            self._goodput.labels(**labels).set(sum(met) / span)


def _result(outcome: Outcome) -> str:
    if outcome.met:
        return "met"
    if not outcome.ttft_met:
        return "ttft_missed" if outcome.tpot_met else "both_missed"
    return "tpot_missed"
