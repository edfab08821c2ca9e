"""The live engine on this machine against the simulator with its own calibration: figures of `docs/fidelity.md`.

    python benchmarks/live_fidelity.py [--seconds S] [--runs N] [--rate R] [--policy P] [--ttft-ms MS] [--tpot-ms MS]

One engine in this process, without HTTP, serves a mixed load, chats with a long prompt now and then, N times over; each
time with new prompts of the same lengths at the same moments. Then the simulator serves it, by the coefficients that
the engine measured when it started. `corrected` is the simulator by coefficients times what iterations of the live runs
took over their prediction (the median): how far the machine was another one than when it was measured. A row has
median TTFT, P99 of the time between tokens, tokens a second, and the share of requests that kept their promise; all
rows but the first have their ratios to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from cluster.loop import IterationRecord
from cluster.simulated.cluster import simulate
from cluster.simulated.machine import Machine
from cluster.simulated.seen import SeenRequest, quantile_of
from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt, poisson
from scheduler.costmodel import CostModel
from scheduler.request import Request
from scheduler.roofline import Features
from scheduler.slo import Promise

LONG_EVERY = 8
"""One prompt in so many is long."""
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


def simulated(config: EngineConfig, machine: Machine, load: OpenLoop) -> list[SeenRequest]:
    return [request for request in simulate(config, machine, load).requests if request.tokens]


@dataclass(frozen=True, slots=True)
class Corrected:
    """A cost model whose iterations all take `times` as long."""

    cost: CostModel
    times: float

    def predict(self, f: Features) -> float:
        return self.cost.predict(f) * self.times


async def measure(options: argparse.Namespace) -> list[Row]:
    promise = Promise(options.ttft_ms / 1e3, options.tpot_ms / 1e3)
    config = EngineConfig(policy=options.policy, ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms, max_running=32)
    engine = await LocalEngine.start(config)
    try:
        assert engine.tuning is not None  # it was measured: nothing says otherwise
        base, ratios, rows = engine.tuning.cost.base, list[float](), list[Row]()

        def note(record: IterationRecord) -> None:
            ratios.append(record.actual_s / sum(map(base.predict, record.features)))

        engine.observers.append(note)
        for run in range(options.runs):
            load = mixed(options.rate, options.seconds, run)
            rows.append(row(f"live {run + 1}", await live(engine, promise, load, run)))
    finally:
        await engine.close()
    machine = Machine(base, replace(engine.info, swap_blocks=0))
    factor = statistics.median(ratios)
    for name, cost in (("simulated", base), (f"corrected x {factor:.2f}", Corrected(base, factor))):
        served = await asyncio.to_thread(simulated, config, replace(machine, cost=cost), load)
        rows.append(row(name, served))
    return [rows[0], *({**of, "over the first": _ratios(of, rows[0])} for of in rows[1:])]


def _ratios(of: Row, first: Row) -> Row:
    names = ("P50 TTFT ms", "P99 ITL ms", "tokens/s", "attainment")
    return {name: round(of[name] / first[name], 3) if first[name] else math.nan for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of arrivals")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--policy", default="slo")
    parser.add_argument("--ttft-ms", type=float, default=4000.0)
    parser.add_argument("--tpot-ms", type=float, default=250.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seconds <= 0 or options.runs < 1 or options.rate * options.seconds < 4:
        parser.exit(2, "--runs is at least 1, and --rate times --seconds at least 4 requests\n")
    for of in asyncio.run(measure(options)):
        print(json.dumps(of) if options.json else ", ".join(f"{key}: {value}" for key, value in of.items()), flush=True)


if __name__ == "__main__":
    main()
