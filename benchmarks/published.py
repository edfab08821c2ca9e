"""What others published about schedulers, done again on the simulated cluster; `docs/fidelity.md` says why it differs.

    python benchmarks/published.py [ITEM ...] [--seeds N] [--duration S] [--json]

ITEM is `ablation`, `capacity`, `tile`, `distserve`, `niyama`, `mooncake` or `forward`; without one, all that need no
file. `--conversation`, `--code` (Azure, CSV) and `--mooncake-trace` (JSON lines) give traces; without them lengths are
drawn from distributions with about the published medians, and `mooncake` is left out. The same seed gives the same
figures. Each item takes seconds to a few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from cluster.config import EngineConfig
from cluster.simulated.capacity import Capacity, Criterion, capacity
from cluster.simulated.cluster import EXACT, SimulatedCluster, simulate
from cluster.simulated.machine import Machine, by_hardware
from cluster.simulated.seen import Simulation, quantile_of
from cluster.simulated.virtual_time import run_virtual
from cluster.workloads import Fixed, OpenLoop, TraceRow, parse_lengths, poisson, read_trace, replay, requests
from deploy.simulation.lengths import Pair, with_lengths
from scheduler.budget import NOTHING_WANTED, Batch, StaticBudget
from scheduler.costmodel import CostModel
from scheduler.hardware import gpu
from scheduler.policies.base import Mix, YoungestVictim, fill_with_chunks
from scheduler.roofline import Features, ModelShape, Roofline
from scheduler.shapes import known_shape

A100 = gpu("A100-80").hardware
RUNNING = 128
PAIRS = 20_000
"""Lengths that a distribution is represented by."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """`duration` in seconds of arrivals; `rows` of a trace at most."""

    seeds: int
    duration: float
    rows: int
    conversation: Path | None = None
    code: Path | None = None
    mooncake_trace: Path | None = None


# Loads.


def drawn(prompt: str, output: str, most: int) -> list[Pair]:
    """Pairs of lengths, those that together exceed `most` tokens drawn anew."""
    source = Random(f"{prompt}/{output}")
    prompts, outputs = parse_lengths(prompt), parse_lengths(output)
    pairs: list[Pair] = []
    while len(pairs) < PAIRS:
        pair = prompts.draw(source), outputs.draw(source)
        if sum(pair) <= most:
            pairs.append(pair)
    return pairs


def sharegpt(most: int = 8192) -> list[Pair]:
    """Median and 90th percentile as Sarathi-Serve has them for ShareGPT: 1,730 and 5,696, outputs 415 and 834."""
    return drawn("lognormal:1730:0.93", "lognormal:415:0.545", most)


def arriving(pairs: Sequence[Pair], rate: float, duration: float, seed: int) -> OpenLoop:
    load = OpenLoop(requests(poisson(rate, duration, seed), Fixed(1), Fixed(1), seed=seed))
    drawn_load = with_lengths(load, pairs, seed)
    assert isinstance(drawn_load, OpenLoop)
    return drawn_load


# Runs.


def engine(model: str, policy: str, **more: Any) -> EngineConfig:
    return EngineConfig(**{"model": model, "policy": policy, "max_running": RUNNING, **more})


def machine_of(config: EngineConfig, shape: ModelShape | None = None, cost: CostModel | None = None) -> Machine:
    machine = by_hardware(config, shape or known_shape(config.model), A100)
    return machine if cost is None else replace(machine, cost=cost)


Load = Callable[[float, int], OpenLoop]


def capacity_of(config: EngineConfig, machine: Machine, load: Load, criterion: Criterion, seeds: int) -> Capacity:
    def run_at(rate: float, seed: int) -> Simulation:
        workload = load(rate, seed)
        return simulate(config, machine, workload, EXACT, criterion.may_miss(len(workload.requests)))

    return capacity(run_at, criterion, range(seeds))


def told(found: Capacity) -> Row:
    """Requests a second, with half of the 95 % interval over seeds, and what broke at the next higher rate."""
    margin = None if found.margin is None else round(found.margin, 3)
    return {"rate": round(found.rate, 3), "margin": margin, "broke": found.seeds[0].broken}


def with_ratios(rows: list[Row], base: str) -> list[Row]:
    """Beside each rate, how many times that of the row of `base` it is."""
    of_base = next(row["rate"] for row in rows if row["policy"] == base)
    return [{**row, f"over {base}": round(row["rate"] / of_base, 2) if of_base else None} for row in rows]


# Items.


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
    async def serve(cluster: SimulatedCluster) -> Simulation:
        if way == "chunking only":
            for loop in cluster.loops:
                loop.scheduler.policy = ApartPolicy(config.chunk_size)
        return await cluster.serve(load)

    return run_virtual(lambda loop: serve(SimulatedCluster(config, machine_of(config), EXACT, loop)))


def _median_ttft(run: Simulation) -> float:
    return quantile_of([seen.tokens[0] - seen.arrival for seen in run.requests if seen.tokens], 0.5)


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 3)


def capacities(options: Options) -> Iterator[Row]:
    """P99 TBT within 5 and 25 decode iterations of 32 streams at 4,096, median scheduling delay within 2 s."""
    for model, tp in (("Mistral-7B", 1), ("Yi-34B", 2)):
        decode_s = Roofline(known_shape(model), A100, tp).predict(Features(decodes=32, decode_context=32 * 4096))
        for name, times, chunk in (("strict", 5, 512), ("relaxed", 25, 2048)):
            bound = times * decode_s
            promised = {"tpot_ms": 1e3 * bound, "tbt_ms": 1e3 * bound}
            found = []
            for policy in ("whole", "chunked", "slo"):
                own = promised if policy == "slo" else {}
                config = engine(model, policy, tp=tp, chunk_size=chunk, **own)
                criterion = Criterion(None, bound, 2.0)
                held = capacity_of(config, machine_of(config), _by_rate(sharegpt(), options), criterion, options.seeds)
                found.append(
                    {"model": model, "SLO": name, "TBT ms": round(1e3 * bound), "policy": policy, **told(held)}
                )
            yield from with_ratios(found, "whole")


def _by_rate(pairs: Sequence[Pair], options: Options) -> Load:
    return lambda rate, seed: arriving(pairs, rate, max(options.duration, 50 / rate), seed)


def tile(options: Options) -> Iterator[Row]:
    """One prompt token more than a whole number of tiles, without streams and among 32 of them at 1,024."""
    for model, tp in (("Mistral-7B", 1), ("Yi-34B", 2)):
        predict = Roofline(known_shape(model), A100, tp).predict
        for tokens in (128, 256, 512, 1024):
            whole, more = (predict(Features().with_chunk(0, count)) for count in (tokens, tokens + 1))
            yield {
                "model": model,
                "tokens": tokens,
                "ms": _ms(whole),
                "one more": _ms(more),
                "percent": _percent(more / whole),
            }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 1)


def forward(options: Options) -> Iterator[Row]:
    """A warm forward of Qwen3-0.6B on one A100, and what its multiplications alone take at the GPU's peak."""
    shape = known_shape("Qwen3-0.6B")
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        seconds = Roofline(shape, A100).predict(Features().with_chunk(0, tokens))
        yield {"tokens": tokens, "ms": _ms(seconds), "at peak ms": _ms(2 * shape.parameters * tokens / A100.peak_flops)}


@dataclass(frozen=True, slots=True)
class FittedByOthers:
    """DistServe's cost model: milliseconds of a prefill a + b tokens + c (sum of squared lengths), of decodes
    a + b context + c requests with other constants from `many` requests on.

    Its engine never mixes the two; an iteration that does is given one intercept, the larger, and both slopes.
    """

    prefill: tuple[float, float, float]
    few: tuple[float, float, float]
    lots: tuple[float, float, float]
    many: int = 95

    def predict(self, f: Features) -> float:
        a, b, c = self.prefill
        squares = 2 * f.chunk_pairs - f.prefill_tokens  # for a whole prompt its length squared; a chunk has its history
        prompts = (a, b * f.prefill_tokens + c * squares) if f.chunks else (0.0, 0.0)
        a, b, c = self.few if f.decodes < self.many else self.lots
        streams = (a, b * f.decode_context + c * f.decodes) if f.decodes else (0.0, 0.0)
        return (max(prompts[0], streams[0]) + prompts[1] + streams[1]) / 1e3


OPT_13B = ModelShape("OPT-13B", 12_850_000_000, 40, 5120, 40, 40, 128, vocab=50272)
OPT_66B = ModelShape("OPT-66B", 65_700_000_000, 64, 9216, 72, 72, 128, vocab=50272)
OPT_13B_COST = FittedByOthers(
    (18.1025, 0.101912, 7.12226e-6), (19.9347, 6.26936e-4, 0.038507), (7.16619, 5.79800e-4, 0.158311)
)
OPT_66B_TP4_COST = FittedByOthers(
    (29.4416, 0.151352, 8.31745e-6), (30.7603, 4.51948e-4, 0.0632842), (27.4708, 4.04685e-4, 0.124807)
)
"""From DistServe's repository (LLMServe/DistServe, Apache-2.0), fitted by its authors on A100-80."""


def distserve(options: Options) -> Iterator[Row]:
    """Groups that do everything against as many that are divided, at 90 % attainment."""
    chat = drawn("lognormal:600:0.8", "lognormal:150:0.8", 2048)
    long = drawn("lognormal:1650:0.15", "lognormal:75:0.6", 2048)
    settings = (
        ("13B, 512 + 64 tokens", OPT_13B, OPT_13B_COST, 1, 2, [(512, 64)], 0.4, 0.04),
        ("13B chat", OPT_13B, OPT_13B_COST, 1, 1, chat, 0.25, 0.1),
        ("66B chat", OPT_66B, OPT_66B_TP4_COST, 4, 1, chat, 2.5, 0.15),
        ("66B summarisation", OPT_66B, OPT_66B_TP4_COST, 4, 1, long, 15.0, 0.15),
    )
    for name, shape, cost, tp, prefill, pairs, ttft, tpot in settings:
        groups = prefill + 1
        apart = {"mode": "separated", "prefill_groups": prefill, "decode_groups": 1, "prefill_policy": "whole"}
        ways: tuple[tuple[str, str, Row], ...] = (
            ("whole", "whole", {"groups": groups}),
            ("chunked 512", "chunked", {"groups": groups}),
            ("slo", "slo", {"groups": groups}),
            (f"separated {prefill}:1", "chunked", apart),
        )
        found = []
        for way, policy, more in ways:
            slo = {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * tpot}
            config = engine(shape.name, policy, tp=tp, block_size=16, **slo, **more)
            machine, load = machine_of(config, shape, cost), _by_rate(pairs, options)
            held = capacity_of(config, machine, load, Criterion(0.9), options.seeds)
            found.append({"setting": name, "policy": way, "GPUs": groups * tp, **told(held)})
        yield from with_ratios(found, "whole")


def niyama(options: Options) -> Iterator[Row]:
    """One A100, Llama-3-8B, TTFT 6 s and TPOT 50 ms for 99 % of the requests, Poisson arrivals."""
    loads = {
        "conversation": _lengths_of(options.conversation) or drawn("lognormal:1020:0.9", "lognormal:129:0.9", 16384),
        "code": _lengths_of(options.code) or drawn("lognormal:1500:0.9", "lognormal:13:0.8", 16384),
    }
    for name, pairs in loads.items():
        found = []
        for way, policy, chunk in _ways((256, 512)):
            config = engine("Llama-3.1-8B", policy, chunk_size=chunk, ttft_ms=6000, tpot_ms=50, max_running=256)
            held = capacity_of(config, machine_of(config), _by_rate(pairs, options), Criterion(0.99), options.seeds)
            found.append({"lengths": name, "policy": way, **told(held)})
        yield from with_ratios(found, "chunked 256")


def _ways(chunks: tuple[int, ...]) -> list[tuple[str, str, int]]:
    return [("whole", "whole", 512), *((f"chunked {chunk}", "chunked", chunk) for chunk in chunks), ("slo", "slo", 512)]


def _lengths_of(path: Path | None) -> list[Pair]:
    return [] if path is None else [(row.prompt_tokens, row.output_tokens) for row in read_trace(path)]


def mooncake(options: Options) -> Iterator[Row]:
    """The trace's first rows, run faster or slower, on one A100 with Llama-3-8B, at two promises."""
    if options.mooncake_trace is None:
        raise ValueError("mooncake needs --mooncake-trace")
    rows = spread(read_trace(options.mooncake_trace, options.rows))
    load = _faster_or_slower(rows)
    for ttft, tpot in ((30_000, 100), (2000, 50)):
        for way, policy, chunk in _ways((512, 2048)):
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


ITEMS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "tile": tile,
    "forward": forward,
    "ablation": ablation,
    "capacity": capacities,
    "distserve": distserve,
    "niyama": niyama,
    "mooncake": mooncake,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="ITEM")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--duration", type=float, default=200.0, help="seconds of arrivals")
    parser.add_argument("--rows", type=int, default=500, help="of a trace, at most")
    for name in ("conversation", "code", "mooncake-trace"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    items, as_json = given.pop("items"), given.pop("json")
    options = Options(**given)
    if options.seeds < 1 or options.duration <= 0 or options.rows < 50:
        parser.exit(2, "--seeds is at least 1, --duration above 0, --rows at least 50\n")
    if unknown := [item for item in items if item not in ITEMS]:
        parser.exit(2, f"unknown item {unknown[0]!r}; known: {', '.join(ITEMS)}\n")
    names = items or [name for name in ITEMS if name != "mooncake" or options.mooncake_trace]
    try:
        for name in names:
            _show(name, ITEMS[name](options), as_json)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


def _show(name: str, rows: Iterable[Row], as_json: bool) -> None:
    """Each row as soon as it is there."""
    for row in rows:
        text = ", ".join(f"{key}: {value}" for key, value in row.items())
        print(json.dumps({"item": name, **row}) if as_json else f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main()
