"""Figures of KV that moved between groups: counts and histograms for `/metrics`, the latest for the decision log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from scheduler.orders import Moved

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_RATES = (1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


class Transfers:
    """`add` takes each one as it has arrived."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"stallfree_kv_transfer_{name}", text, list(labels), registry=registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            full = f"stallfree_kv_transfer_{name}"
            return Histogram(full, text, list(labels), buckets=buckets, registry=registry).labels(**labels)

        self._count = counter("requests", "Requests whose KV moved from a prefill to a decode group")
        self._bytes = counter("bytes", "Bytes of KV that were sent")
        self._early = counter("early_bytes", "Of these, sent while the prompt was still being computed")
        self._shared = counter("reused_blocks", "Blocks that were not sent because the decode group had them")
        self._seconds = histogram("seconds", "Seconds that sending a request's KV took", _SECONDS)
        self._wait = histogram("wait_seconds", "First token to the KV being with the decode group", _SECONDS)
        self._rate = histogram("bytes_per_second", "Bandwidth while a request's KV was being sent", _RATES)
        self._latest: list[dict[str, Any]] = []
        self._sums: dict[str, float] = {"requests": 0, "bytes": 0, "early_bytes": 0, "send_s": 0.0, "wait_s": 0.0}

    def add(self, moved: Moved) -> None:
        self._count.inc()
        self._bytes.inc(moved.bytes)
        self._early.inc(moved.early_bytes)
        self._shared.inc(moved.blocks_shared)
        self._seconds.observe(moved.send_s)
        self._wait.observe(moved.wait_s)
        if moved.bytes:
            self._rate.observe(moved.bandwidth)
        for name in self._sums:
            self._sums[name] += 1 if name == "requests" else getattr(moved, name)
        self._latest.append(_as_entry(moved))

    def figures(self) -> dict[str, float]:
        """Sums since the beginning: requests, bytes, bytes that were sent early, seconds of sending and of waiting."""
        return dict(self._sums)

    def take_latest(self) -> list[dict[str, Any]]:
        """Those since the last call, as the decision log tells them; `sends` in seconds of the schedulers' clock."""
        latest, self._latest = self._latest, []
        return latest


def _as_entry(moved: Moved) -> dict[str, Any]:
    told = asdict(moved)
    request, send_s, wait_s = told.pop("request_id"), told.pop("send_s"), told.pop("wait_s")
    return {"request": request, **told, "send_ms": round(send_s * 1e3, 3), "wait_ms": round(wait_s * 1e3, 3)}
