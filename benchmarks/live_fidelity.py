"""The live engine on this machine against the simulator with its own calibration: figures of `docs/fidelity.md`.

    python benchmarks/live_fidelity.py [--seconds S] [--runs N] [--rate R] [--policy P] [--ttft-ms MS] [--tpot-ms MS]

One engine in this process, without HTTP, serves a mixed load, chats with a long prompt now and then, N times over; each
time with new prompts of the same lengths at the same moments. Then the simulator serves it: `at the start`, by the
coefficients that the engine measured when it started, on a machine that did nothing else; `as it served`, by
coefficients that are fitted in the same way to the iterations of the first live run, with their scatter: how far the
machine was another one than when it was measured. A row has median TTFT, P99 of the time between tokens, tokens a
second, and the share of requests that kept their promise, and their ratios to the mean of the live runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from dataclasses import replace
from random import Random
from typing import Any

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from cluster.loop import IterationRecord
from cluster.simulated.cluster import EXACT, Noise, simulate
from cluster.simulated.machine import Machine
from cluster.simulated.seen import SeenRequest, quantile_of
from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt, poisson
from scheduler.costmodel import Coefficients, Sample, fit
from scheduler.request import Request
from scheduler.slo import Promise

LONG_EVERY = 8
"""One prompt in so many is long."""
OUTLIER = 3.0
FIGURES = ("P50 TTFT ms", "P99 ITL ms", "tokens/s", "attainment")
Row = dict[str, Any]


def mixed(rate: float, seconds: float, run: int) -> OpenLoop:
    """Chats of 32 to 256 prompt tokens and 16 to 96 answered, and long prompts of 768 to 1,280 with 8 to 16. Runs
    differ in what prompts say, and in nothing else."""
    source, planned = Random("mixed"), []
    for number, at_s in enumerate(poisson(rate, seconds)):
        long = number % LONG_EVERY == LONG_EVERY - 1
        prompt = source.randint(768, 1280) if long else source.randint(32, 256)
        output = source.randint(8, 16) if long else source.randint(16, 96)
        planned.append(PlannedRequest(RandomPrompt(prompt, f"{run}/{number}"), output, at_s))
    return OpenLoop(planned)


def row(name: str, requests: list[SeenRequest]) -> Row:
    began = min(request.arrival for request in requests)
    ended = max(request.tokens[-1] for request in requests)
    gaps = [gap for request in requests for gap in request.gaps]
    return {
        "run": name,
        "requests": len(requests),
        "P50 TTFT ms": _ms(quantile_of([request.tokens[0] - request.arrival for request in requests], 0.5)),
        "P99 ITL ms": _ms(quantile_of(gaps, 0.99)),
        "tokens/s": round(sum(len(request.tokens) for request in requests) / (ended - began), 2),
        "attainment": round(sum(request.met for request in requests) / len(requests), 4),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


async def live(engine: LocalEngine, promise: Promise, load: OpenLoop, run: int) -> list[SeenRequest]:
    began = time.monotonic()

    async def serve(number: int, planned: PlannedRequest) -> SeenRequest:
        assert isinstance(planned.prompt, RandomPrompt)  # `mixed` makes no others
        prompt = tuple(planned.prompt.token_ids())
        request = Request(f"{run}/{number}", prompt, planned.output_tokens, promise=promise)
        await asyncio.sleep(began + planned.at_s - time.monotonic())
        seen = SeenRequest(planned, time.monotonic() - began, len(prompt), promise)
        async for delta in engine.generate(request):
            seen.tokens.extend([time.monotonic() - began] * len(delta.tokens))
        return seen

    return list(await asyncio.gather(*(serve(number, planned) for number, planned in enumerate(load.requests))))


def simulated(config: EngineConfig, machine: Machine, load: OpenLoop, noise: Noise) -> list[SeenRequest]:
    return [request for request in simulate(config, machine, load, noise).requests if request.tokens]


def served_as(samples: list[Sample]) -> tuple[Coefficients, Noise]:
    """What iterations cost while they served, and how they scatter: by half of the distance between the 16th and the
    84th percentile, as a normal distribution has it. What takes OUTLIER times the median of its ratio or more is left
    out of the fit: of an interruption the coefficients know nothing."""
    first = fit(samples)
    usual = statistics.median(sample.seconds / first.predict(sample.features) for sample in samples)
    kept = [sample for sample in samples if sample.seconds < OUTLIER * usual * first.predict(sample.features)]
    cost = fit(kept)
    errors = sorted(math.log(sample.seconds / cost.predict(sample.features)) for sample in samples)
    low, high = (errors[int(share * (len(errors) - 1))] for share in (0.16, 0.84))
    return cost, Noise((high - low) / 2)


async def measure(options: argparse.Namespace) -> list[Row]:
    promise = Promise(options.ttft_ms / 1e3, options.tpot_ms / 1e3)
    config = EngineConfig(policy=options.policy, ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms, max_running=32)
    engine = await LocalEngine.start(config)
    try:
        assert engine.tuning is not None  # it was measured: nothing says otherwise
        base, samples, rows = engine.tuning.cost.base, list[Sample](), list[Row]()

        def note(record: IterationRecord) -> None:
            if not rows and len(record.features) == 1:
                samples.append(Sample(record.features[0], record.actual_s))

        engine.observers.append(note)
        for run in range(options.runs):
            load = mixed(options.rate, options.seconds, run)
            rows.append(row(f"live {run + 1}", await live(engine, promise, load, run)))
    finally:
        await engine.close()
    machine, lived = Machine(base, replace(engine.info, swap_blocks=0)), list(rows)
    for name, (cost, noise) in {"at the start": (base, EXACT), "as it served": served_as(samples)}.items():
        served = await asyncio.to_thread(simulated, config, replace(machine, cost=cost), load, noise)
        rows.append(row(f"simulated, {name}", served))
    return [{**of, "over the live runs": _ratios(of, lived)} for of in rows]


def _ratios(of: Row, lived: list[Row]) -> Row:
    means = {name: statistics.mean(live[name] for live in lived) for name in FIGURES}
    return {name: round(of[name] / mean, 3) if mean else math.nan for name, mean in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of arrivals")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--policy", default="slo")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, default=250.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seconds <= 0 or options.runs < 1 or options.rate * options.seconds < 4:
        parser.exit(2, "--runs is at least 1, and --rate times --seconds at least 4 requests\n")
    for of in asyncio.run(measure(options)):
        print(json.dumps(of) if options.json else ", ".join(f"{key}: {value}" for key, value in of.items()), flush=True)


if __name__ == "__main__":
    main()
