"""What one long prompt did to the streams that were running when it came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deploy.bench.record import RequestRecord
from deploy.bench.spread import Spread, ms


@dataclass(frozen=True, slots=True)
class Intrusion:
    """Seconds. `before` and `during` are the streams' gaps: before the long prompt was sent, and from then until its
    first token. `running` of `streams` were still generating when it was sent."""

    streams: int
    running: int
    ttft_long_s: float | None
    before: Spread
    during: Spread

    def as_json(self) -> dict[str, Any]:
        return {
            "streams": self.streams,
            "running": self.running,
            "ttft_long_ms": ms(self.ttft_long_s),
            "gaps_before_ms": self.before.as_json(),
            "gaps_during_ms": self.during.as_json(),
        }


def intrusion(records: Sequence[RequestRecord]) -> Intrusion | None:
    """Of an interference run, whose one request of kind "long" came last; None for any other."""
    longs = [record for record in records if record.kind == "long"]
    streams = [record for record in records if record.kind == "stream"]
    if len(longs) != 1 or not streams:
        return None
    long = longs[0]
    gaps = [gap for stream in streams for gap in pairwise(stream.tokens)]
    first = long.tokens[0] if long.tokens else long.ended_s
    return Intrusion(
        streams=len(streams),
        running=sum(stream.ended_s > long.sent_s for stream in streams),
        ttft_long_s=long.ttft_s,
        before=Spread.of(end - start for start, end in gaps if end <= long.sent_s),
        during=Spread.of(end - start for start, end in gaps if _is_during(start, end, long.sent_s, first)),
    )


def _is_during(start: float, end: float, sent: float, first: float) -> bool:
    """A gap that lies in the prefill for more than half of it. Left out are the iteration that was under way when the
    prompt came, which knew nothing of it, and the one that the first token's moment begins."""
    overlap = min(end, first) - max(start, sent)
    return overlap > (end - start) / 2 and (start >= sent or end >= first)
