"""How well the cost model predicts: a mixed load on the real engine, each iteration predicted before it runs.

    python benchmarks/prediction.py [--seconds 60] [--json]

Reports the absolute relative error (median, 90th percentile) and the bias (median of actual over predicted, less 1)
over all iterations, and by kind. Targets: 10 %, 25 % and 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from cluster.loop import IterationRecord
from scheduler.request import Request
from scheduler.sampling import SamplingParams

TARGETS = {"median_abs_error": 0.10, "p90_abs_error": 0.25, "abs_bias": 0.05}


@dataclass(frozen=True, slots=True)
class Pair:
    kind: str
    predicted: float
    actual: float


class Collector:
    """Predicts with the model as it is before it learns from the iteration."""

    def __init__(self, engine: LocalEngine) -> None:
        assert engine.tuning is not None  # the engine was started with the slo policy
        self._cost = engine.tuning.cost
        self.pairs: list[Pair] = []

    def __call__(self, record: IterationRecord) -> None:
        features = record.features[0]
        kind = "mixed" if features.decodes and features.prefill_tokens else "decode" if features.decodes else "prefill"
        self.pairs.append(Pair(kind, self._cost.predict(features), record.ended - record.started))


async def load(engine: LocalEngine, seconds: float, seed: int) -> None:
    """Prompts of 16 to 2,000 tokens and answers of 8 to 80, arriving at random, at most 24 at once."""
    rnd = random.Random(seed)
    deadline, room, tasks = time.monotonic() + seconds, asyncio.Semaphore(24), []

    async def one(name: str) -> None:
        prompt = tuple(rnd.randrange(engine.info.vocab_size) for _ in range(int(2 ** rnd.uniform(4, 11))))
        request = Request(name, prompt, rnd.randrange(8, 80), SamplingParams(temperature=0.0))
        async for _ in engine.generate(request):
            pass
        room.release()

    while time.monotonic() < deadline:
        await room.acquire()
        tasks.append(asyncio.create_task(one(f"r{len(tasks)}")))
        await asyncio.sleep(rnd.expovariate(1.0))
    await asyncio.gather(*tasks)


def summary(pairs: list[Pair]) -> dict[str, float | int]:
    ratios = sorted(pair.actual / pair.predicted for pair in pairs)
    errors = sorted(abs(pair.actual / pair.predicted - 1) for pair in pairs)
    return {
        "n": len(pairs),
        "median_abs_error": round(statistics.median(errors), 4),
        "p90_abs_error": round(errors[int(0.9 * (len(errors) - 1))], 4),
        "bias": round(statistics.median(ratios) - 1, 4),
        "median_actual_ms": round(1e3 * statistics.median(pair.actual for pair in pairs), 2),
    }


async def run(seconds: float, seed: int) -> dict[str, object]:
    engine = await LocalEngine.start(EngineConfig(policy="slo"))
    collector = Collector(engine)
    engine.observers.append(collector)
    print("load running", file=sys.stderr)
    await load(engine, seconds, seed)
    await engine.close()
    pairs = collector.pairs
    kinds = {kind: summary([p for p in pairs if p.kind == kind]) for kind in sorted({p.kind for p in pairs})}
    return {"all": summary(pairs), **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.seconds, arguments.seed))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{'iterations':<10} {'n':>6} {'|error| p50':>12} {'|error| p90':>12} {'bias':>8} {'actual p50':>12}")
    for kind, row in result.items():
        assert isinstance(row, dict)
        print(
            f"{kind:<10} {row['n']:>6} {row['median_abs_error']:>12.1%} {row['p90_abs_error']:>12.1%} "
            f"{row['bias']:>8.1%} {row['median_actual_ms']:>9.1f} ms"
        )
    print(f"targets: median {TARGETS['median_abs_error']:.0%}, p90 {TARGETS['p90_abs_error']:.0%}, bias within 5 %")


if __name__ == "__main__":
    main()
