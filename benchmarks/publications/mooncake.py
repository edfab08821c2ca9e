"""Mooncake's trace, replayed with the prefixes that its requests have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.publications.held import capacity_of, engine, machine_of, told, ways
from benchmarks.publications.loads import Load
from benchmarks.publications.options import Options, Row
from cluster.simulated.capacity import Criterion
from cluster.workloads import TraceRow, read_trace, replay


def mooncake(options: Options) -> Iterator[Row]:
    """The trace's first rows, run faster or slower, on one A100 with Llama-3-8B, at two promises."""
    if options.mooncake_trace is None:
        raise ValueError("mooncake needs --mooncake-trace")
    rows = spread(read_trace(options.mooncake_trace, options.rows))
    load = _faster_or_slower(rows)
    for ttft, tpot in ((30_000, 100), (2000, 50)):
        for way, policy, chunk in ways((512, 2048)):
            config = engine("Llama-3.1-8B", policy, chunk_size=chunk, ttft_ms=ttft, tpot_ms=tpot)
            held = capacity_of(config, machine_of(config), load, Criterion(0.9), 1)
            yield {"TTFT ms": ttft, "TPOT ms": tpot, "policy": way, **told(held)}


def spread(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Those of one moment over the time until the next: the trace's clock ticks every three seconds, and run slower its
    requests would still come all at once."""
    moments = sorted({row.at_s for row in rows})
    until = dict(pairwise(moments))
    until[moments[-1]] = moments[-1] + (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    number, of = Counter[float](), Counter(row.at_s for row in rows)
    found = []
    for row in rows:
        part = number[row.at_s] / of[row.at_s]
        number[row.at_s] += 1
        found.append(replace(row, at_s=row.at_s + part * (until[row.at_s] - row.at_s)))
    return found


def _faster_or_slower(rows: Sequence[TraceRow]) -> Load:
    lasts = max(row.at_s for row in rows) - min(row.at_s for row in rows)
    return lambda rate, seed: replay(rows, rate_scale=rate * lasts / len(rows))
