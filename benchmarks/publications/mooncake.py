"""Mooncake's trace, replayed with the prefixes that its requests have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.publications.held import A100, capacity_of, engine, machine_of, told, ways
from benchmarks.publications.loads import Load
from benchmarks.publications.options import Options, Row
from cluster.config import EngineConfig
from cluster.simulated.capacity import Criterion
from cluster.workloads import TraceRow, read_trace, replay
from scheduler.roofline import Roofline
from scheduler.shapes import known_shape
from scheduler.solver import Load as Prompts
from scheduler.solver import Solver

MODEL = "Llama-3.1-8B"
REFUSING = "slo, refusing"
"""Whom it cannot serve in time as far as it can tell, instead of serving them when there is room."""
KEPT = 0.9
"""Of the requests that can be in time at all."""


def mooncake(options: Options) -> Iterator[Row]:
    """The trace's first rows, run faster or slower, on one A100 with Llama-3-8B.

    At TTFT 2 s many of its prompts are late however idle the GPU is. So that promise is asked for twice: in the whole
    trace of 90 % of the requests that are in time alone, which may be any; and in a trace without the others.
    """
    if options.mooncake_trace is None:
        raise ValueError("mooncake needs --mooncake-trace")
    rows = spread(read_trace(options.mooncake_trace, options.rows))
    yield from _held(rows, "all", 30_000, 100, KEPT)
    short = [row for row in rows if in_time_alone(row, 2.0)]
    yield from _held(rows, "all", 2000, 50, KEPT * len(short) / len(rows))
    yield from _held(short, "in time alone", 2000, 50, KEPT)


def in_time_alone(row: TraceRow, ttft_s: float) -> bool:
    """Whether an idle A100 that has nothing of its prompt cached computes it in time, with batches as engines take."""
    solver = Solver(Roofline(known_shape(MODEL), A100))
    most = EngineConfig(model=MODEL).max_batched_tokens
    return solver.prefill(Prompts(max(1, row.prompt_tokens), 0, 0), most) <= ttft_s


def _held(rows: Sequence[TraceRow], which: str, ttft: float, tpot: float, attainment: float) -> Iterator[Row]:
    mean = round(sum(row.prompt_tokens for row in rows) / len(rows))
    about = {"rows": which, "n": len(rows), "mean prompt": mean, "TTFT ms": ttft, "TPOT ms": tpot}
    for way, policy, chunk in (*ways((256, 512, 1024, 2048)), (REFUSING, "slo", 512)):
        hopeless = "reject" if way == REFUSING else "best-effort"
        promised = {"ttft_ms": ttft, "tpot_ms": tpot, "on_infeasible": hopeless}
        config = engine(MODEL, policy, chunk_size=chunk, max_running=256, **promised)
        held = capacity_of(config, machine_of(config), _faster_or_slower(rows), Criterion(attainment), 1)
        yield {**about, "attainment": round(attainment, 3), "policy": way, **told(held)}


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
