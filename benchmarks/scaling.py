"""What one scheduler process carries, and what a long simulation costs; `docs/scaling.md` reads the figures.

    python benchmarks/scaling.py [cost] [actor] [length] [one] [--cost-ms MS] [--groups 1,4,16] [--requests N]
                                 [--rate R] [--every N] [--json]

`cost`: milliseconds of one schedule plus commit, with the plan encoded and decoded, by how many sequences decode.
`actor`: groups whose loops share one processor that takes `--cost-ms` for each iteration, simulated; how much longer
iterations take than the forwards in them. `one`: processor time, iterations and memory of a simulation of N requests on
the first number of `--groups`, of which each gets R requests a second, and what it took so far after every N requests;
`length`: the same of N, 2 N and 4 N requests on 16 groups. Times are of this machine; ratios are what to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from cluster.config import EngineConfig
from cluster.simulated.cluster import EXACT, SimulatedCluster, simulate_stream
from cluster.simulated.executor import SimulatedExecutor, until
from cluster.simulated.machine import by_hardware
from cluster.simulated.seen import Simulation
from cluster.simulated.virtual_time import run_virtual
from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt, parse_lengths, poisson, requests
from scheduler.codec import decode_plan, encode_plan
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.hardware import gpu
from scheduler.plan import IterationPlan, IterationResult
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.shapes import known_shape

MODEL = "Llama-3.1-8B"
Row = dict[str, Any]


# What an iteration costs the scheduler.


def costs(sizes: Sequence[int] = (8, 32, 64, 128, 256)) -> list[Row]:
    return [{"decodes": size, **_cost(size)} for size in sizes]


def _cost(size: int, iterations: int = 200) -> Row:
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=(size + 1) * 40, block_size=16, max_model_len=600, vocab_size=1000, max_running=size
        ),
        make_policy("slo", cost=OnlineCostModel(Coefficients(0.002, 0.01, 1e-5, 1e-9, 1e-11, 1e-6, 2.0))),
    )
    for number in range(size):
        scheduler.add(Request(str(number), tuple(range(32)), 500), 0.0)
    deciding, coding = [], []
    for number in range(iterations):
        started = time.process_time()
        plan = scheduler.schedule(0.02 * number)
        assert plan is not None  # everybody has work
        scheduled = time.process_time()
        decode_plan(encode_plan(plan))
        coded = time.process_time()
        answer = (7,) * len(scheduler.under_way(plan.iteration).sampling)
        answered = time.process_time()
        scheduler.commit(IterationResult(plan.iteration, answer), 0.02 * number)
        scheduler.take_timings()
        deciding.append(scheduled - started + time.process_time() - answered)
        coding.append(coded - scheduled)
    later = slice(iterations // 4, None)
    return {"schedule + commit ms": _median_ms(deciding[later]), "encode + decode ms": _median_ms(coding[later])}


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


# Groups that share a scheduler process.


class SharedProcessor:
    """One thread that every iteration of every group has to itself for `cost_s`, first come first served."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s
        self.waited_s: list[float] = []
        self._free_at = 0.0

    async def take(self) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + self.cost_s
        self.waited_s.append(self._free_at - now)
        await until(self._free_at)


class Behind(SimulatedExecutor):
    """An executor whose plans come only when the shared processor has made them."""

    def __init__(self, processor: SharedProcessor, inner: SimulatedExecutor) -> None:
        self._processor = processor
        self._inner = inner

    async def execute(self, plan: IterationPlan) -> IterationResult:
        await self._processor.take()
        return await self._inner.execute(plan)


def actor(groups: Sequence[int], cost_ms: float, rate: float = 5.0, duration: float = 10.0) -> list[Row]:
    """Each group an A100 with `rate` requests/s of 512 prompt and 128 output tokens, one plan under way and two."""
    rows = []
    for overlap in (1, 2):
        for count in groups:
            config = EngineConfig(model=MODEL, policy="slo", groups=count, overlap=overlap, tpot_ms=50, ttft_ms=2000)
            bare, alone = _behind(config, 0.0, rate * count, duration)
            run, processor = _behind(config, cost_ms / 1e3, rate * count, duration)
            wait_ms = 1e3 * statistics.fmean(processor.waited_s)
            rows.append(
                {
                    "overlap": overlap,
                    "groups": count,
                    "iterations/s": round(run.iterations.count / run.ended),
                    "processor busy": round(len(processor.waited_s) * processor.cost_s / run.ended, 3),
                    "plan comes after ms": round(wait_ms, 2),
                    "P50 ITL ms": round(1e3 * run.gap_quantile(0.5), 2),
                    "P99 ITL ms": round(1e3 * run.gap_quantile(0.99), 2),
                    "P50 ITL without ms": round(1e3 * bare.gap_quantile(0.5), 2),
                    "attainment": round(run.attainment, 3),
                }
            )
            assert alone.cost_s == 0
    return rows


def _behind(config: EngineConfig, cost_s: float, rate: float, duration: float) -> tuple[Simulation, SharedProcessor]:
    machine = by_hardware(config, known_shape(MODEL), gpu("A100-80").hardware)
    processor = SharedProcessor(cost_s)

    async def serve(cluster: SimulatedCluster) -> Simulation:
        for loop in cluster.loops:
            inner = loop._executor
            assert isinstance(inner, SimulatedExecutor)
            loop._executor = Behind(processor, inner)
        return await cluster.serve(_load(rate, duration))

    return run_virtual(lambda loop: serve(SimulatedCluster(config, machine, EXACT, loop))), processor


def _load(rate: float, duration: float) -> OpenLoop:
    times = poisson(rate, duration)
    return OpenLoop(requests(times, parse_lengths("256:768"), parse_lengths("64:192")))


# Long simulations.


def lengths(count: int, groups: int = 16, rate: float = 5.0) -> list[Row]:
    """Each in a process of its own, so that its memory is its own."""
    return [_own_process(times * count, groups, rate) for times in (1, 2, 4)]


def _own_process(count: int, groups: int, rate: float) -> Row:
    asked = ["--requests", str(count), "--groups", str(groups), "--rate", str(rate)]
    ran = subprocess.run(
        [sys.executable, __file__, "one", *asked, "--json"], capture_output=True, text=True, check=True
    )
    row: Row = json.loads(ran.stdout)["one"][0]
    return row


def one(count: int, groups: int, rate: float = 5.0, every: int = 0) -> list[Row]:
    """`rate` in requests a second of each group; `every` so many requests it is told what they took, 0: never."""
    config = EngineConfig(model=MODEL, policy="slo", groups=groups, tpot_ms=50, ttft_ms=2000)
    machine = by_hardware(config, known_shape(MODEL), gpu("A100-80").hardware)
    before = _peak_mb()
    began, started = time.perf_counter(), time.process_time()
    stream = _stream(rate * groups, count)
    totals, run = simulate_stream(config, machine, _told(stream, every, started) if every else stream)
    seconds, wall_s = time.process_time() - started, time.perf_counter() - began
    tokens = run.iterations.prefill_tokens + run.iterations.decodes
    return [
        {
            "requests": totals.requests,
            "groups": groups,
            "simulated s": round(run.ended, 1),
            "iterations": run.iterations.count,
            "processor s": round(seconds, 2),
            "wall s": round(wall_s, 1),
            "ms a request": round(1e3 * seconds / totals.requests, 2),
            "iterations/s": round(run.iterations.count / seconds),
            "tokens/s": round(tokens / seconds),
            "peak MB": round(_peak_mb()),
            "peak MB before": round(before),
            "attainment": round(totals.attainment, 3),
            "P99 ITL ms": round(1e3 * totals.gaps.quantile(0.99), 1),
        }
    ]


def _stream(rate: float, count: int) -> Iterator[PlannedRequest]:
    """As `_load` has them, each made when it is due."""
    source, at_s = Random("stream"), 0.0
    for number in range(count):
        at_s += source.expovariate(rate)
        yield PlannedRequest(RandomPrompt(source.randint(256, 768), str(number)), source.randint(64, 192), at_s)


def _told(stream: Iterator[PlannedRequest], every: int, started: float) -> Iterator[PlannedRequest]:
    """The same requests, and a line to standard error with each so many of them."""
    for number, request in enumerate(stream):
        if number and number % every == 0:
            seconds = time.process_time() - started
            print(f"{number} requests came: {seconds:.1f} s, {_peak_mb():.0f} MB", file=sys.stderr, flush=True)
        yield request


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", choices=["cost", "actor", "length", "one", []], metavar="ITEM")
    parser.add_argument("--cost-ms", type=float, default=1.0, help="of the scheduler's processor, an iteration")
    parser.add_argument("--groups", default="1,4,8,16,24,32")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=5.0, help="of a group, requests a second")
    parser.add_argument("--every", type=int, default=0, help="requests, after which `one` tells where it is")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    groups = [int(part) for part in options.groups.split(",")]
    items: dict[str, Callable[[], list[Row]]] = {
        "cost": costs,
        "actor": lambda: actor(groups, options.cost_ms),
        "length": lambda: lengths(options.requests, rate=options.rate),
        "one": lambda: one(options.requests, groups[0], options.rate, options.every),
    }
    for name in options.items or ["cost", "actor", "length"]:
        rows = items[name]()
        if options.json:
            print(json.dumps({name: rows}), flush=True)
            continue
        print(name)
        for row in rows:
            print("  " + ", ".join(f"{key}: {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
