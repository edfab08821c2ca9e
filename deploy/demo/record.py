"""What was seen of one phase of the demonstration, and the figures that follow from it. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One streamed request: when it was sent and when each of its tokens came, on the phase's clock."""

    sent: float
    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def tpot(self) -> float:
        """(last - first) / (tokens - 1): the mean gap of this stream."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Each gap between two tokens as (start, end)."""
        return list(pairwise(self.tokens))


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """Streams that were running when one long prompt came, under one policy. The clock starts with the first stream."""

    policy: str
    chunk_size: int | None
    streams: tuple[StreamRecord, ...]
    long: StreamRecord
    long_tokens: int

    @property
    def end(self) -> float:
        return max(stream.tokens[-1] for stream in (*self.streams, self.long))

    @property
    def title(self) -> str:
        return self.policy if self.chunk_size is None else f"{self.policy} {self.chunk_size}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Gaps are ITLs of the streams: `before` the long prompt was sent, and `during` its prefill. `n_during` is the
    number of those. `tokens_per_s` counts the streams' tokens."""

    ttft_long_s: float
    tpot_s: float
    gap_before_s: float
    gap_during_s: float
    gap_max_s: float
    n_during: int
    tokens_per_s: float

    def as_json(self) -> dict[str, Any]:
        """In milliseconds, with the unit in the name."""
        return {
            "ttft_long_ms": round(self.ttft_long_s * 1e3, 1),
            "tpot_ms": round(self.tpot_s * 1e3, 1),
            "gap_before_median_ms": round(self.gap_before_s * 1e3, 1),
            "gap_during_median_ms": round(self.gap_during_s * 1e3, 1),
            "gap_max_ms": round(self.gap_max_s * 1e3, 1),
            "gaps_during": self.n_during,
            "tokens_per_s": round(self.tokens_per_s, 2),
        }


def figures(phase: PhaseRecord) -> Figures:
    """The figures of one phase; each stream needs two tokens, and the long request one."""
    gaps = [gap for stream in phase.streams for gap in stream.gaps]
    sent, first = phase.long.sent, phase.long.tokens[0]
    before = [end - start for start, end in gaps if end <= sent]
    during = [end - start for start, end in gaps if _within(start, end, sent, first)]
    span = max(stream.tokens[-1] for stream in phase.streams) - min(stream.tokens[0] for stream in phase.streams)
    return Figures(
        ttft_long_s=phase.long.ttft,
        tpot_s=median(stream.tpot for stream in phase.streams),
        gap_before_s=median(before) if before else 0.0,
        gap_during_s=median(during) if during else 0.0,
        gap_max_s=max(end - start for start, end in gaps),
        n_during=len(during),
        tokens_per_s=sum(len(stream.tokens) - 1 for stream in phase.streams) / span if span else 0.0,
    )


def _within(start: float, end: float, sent: float, first: float) -> bool:
    """Whether a gap is one of the prefill's: not the iteration that was under way when the prompt came, and not the one
    after it, which the same moment begins."""
    overlap = min(end, first) - max(start, sent)
    return overlap > (end - start) / 2 and (start >= sent or end >= first)


def as_json_phase(phase: PhaseRecord) -> dict[str, Any]:
    """Figures and, for a plot of one's own, every token's time in milliseconds from the first request of the phase."""

    def stream(record: StreamRecord) -> dict[str, Any]:
        return {"sent_ms": round(record.sent * 1e3, 1), "tokens_ms": [round(t * 1e3, 1) for t in record.tokens]}

    return {
        "policy": phase.policy,
        "chunk_size": phase.chunk_size,
        "long_tokens": phase.long_tokens,
        **figures(phase).as_json(),
        "streams": [stream(record) for record in phase.streams],
        "long": stream(phase.long),
    }
