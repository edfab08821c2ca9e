"""Sarathi-Serve (OSDI 2024): what each half of it is good for, and its capacity at strict and relaxed SLOs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.publications.held import A100, capacity_of, engine, machine_of, served, told, with_ratios
from benchmarks.publications.loads import arriving, by_rate, sharegpt
from benchmarks.publications.options import Options, Row
from cluster.config import EngineConfig
from cluster.simulated.capacity import Criterion
from cluster.simulated.seen import Simulation, quantile_of
from cluster.workloads import OpenLoop
from scheduler.budget import NOTHING_WANTED, Batch, StaticBudget
from scheduler.policies.base import Mix, YoungestVictim, fill_with_chunks
from scheduler.roofline import Features, Roofline
from scheduler.shapes import known_shape


class ApartPolicy(YoungestVictim):
    """Chunks as `chunked` has them and all decodes, but in two forwards: chunking without hybrid batches."""

    name: ClassVar[str] = "apart"

    def __init__(self, chunk_size: int) -> None:
        self._budget = StaticBudget(chunk_size)

    def compose(self, batch: Batch) -> list[Mix]:
        self.decision = self._budget.decide(batch) if batch.prefills else NOTHING_WANTED
        chunks = Mix(chunks=fill_with_chunks(batch.prefills, self.decision.token_budget))
        return [mix for mix in (chunks, Mix(batch.decodes)) if not mix.empty]


WHOLE_PROMPTS = 8192
"""A chunk that holds any prompt of the load: hybrid batches without chunking."""


def ablation(options: Options) -> Iterator[Row]:
    """Yi-34B on two A100, ShareGPT's lengths at 1 request/s."""
    ways = [("hybrid only", WHOLE_PROMPTS)]
    ways += [(way, chunk) for chunk in (512, 1024) for way in ("chunking only", "both")]
    for way, chunk in ways:
        config = engine("Yi-34B", "chunked", tp=2, chunk_size=chunk)
        runs = [
            _ablated(config, way, arriving(sharegpt(), 1.0, 2 * options.duration, seed))
            for seed in range(options.seeds)
        ]
        first = [_median_ttft(run) for run in runs]
        gaps = [run.gap_quantile(0.99) for run in runs]
        yield {"way": way, "chunk": chunk, "P50 TTFT s": _mean(first), "P99 TBT s": _mean(gaps)}


def _ablated(config: EngineConfig, way: str, load: OpenLoop) -> Simulation:
    own = (lambda engine: ApartPolicy(engine.chunk_size)) if way == "chunking only" else None
    return served(config, machine_of(config), load, own=own)


def _median_ttft(run: Simulation) -> float:
    return quantile_of([seen.tokens[0] - seen.arrival for seen in run.requests if seen.tokens], 0.5)


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 3)


@dataclass(frozen=True, slots=True)
class Delay(Criterion):
    """As Sarathi-Serve has it, with a bound on the delays of more requests than half: who chooses whom to give up has a
    short median as long as those are fewer than half."""

    share: float = 0.5

    def broken(self, run: Simulation) -> str:
        said = Criterion.broken(self, run)
        if said or self.delay_s is None or (delay := run.delay_quantile(self.share)) <= self.delay_s:
            return said
        return f"{self.share:.0%} of scheduling delays within {delay:.2f} s, above {self.delay_s:g} s"


SHARES = (0.5, 0.9)
"""Of the requests whose scheduling delay is bounded: the published half, and nearly all."""


def capacities(options: Options) -> Iterator[Row]:
    """P99 TBT within 5 and 25 decode iterations of 32 streams at 4,096, scheduling delay within 2 s for half of the
    requests, as published, and for 90 %."""
    for model, tp in (("Mistral-7B", 1), ("Yi-34B", 2)):
        decode_s = Roofline(known_shape(model), A100, tp).predict(Features(decodes=32, decode_context=32 * 4096))
        for name, times, chunk in (("strict", 5, 512), ("relaxed", 25, 2048)):
            bound = times * decode_s
            promised = {"tpot_ms": 1e3 * bound, "tbt_ms": 1e3 * bound}
            for share in SHARES:
                about = {"model": model, "SLO": name, "TBT ms": round(1e3 * bound), "delays": share}
                found = []
                for policy in ("whole", "chunked", "slo"):
                    own = promised if policy == "slo" else {}
                    config = engine(model, policy, tp=tp, chunk_size=chunk, **own)
                    holds, load = Delay(None, bound, 2.0, share), by_rate(sharegpt(), options)
                    held = capacity_of(config, machine_of(config), load, holds, options.seeds)
                    found.append({**about, "policy": policy, **told(held)})
                yield from with_ratios(found, "whole")
