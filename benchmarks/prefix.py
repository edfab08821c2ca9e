"""What a shared system prompt is worth: time to first token of the first request with it, and of the second.

    python benchmarks/prefix.py [--json] [--tokens 1500] [--rounds 5]

On the in-process engine with the embedded model. Each round has a system prompt of its own: one request computes it,
the next ends differently and finds it. Rounds alternate, so that a machine that gets slower meanwhile does so for both.
Target: the median of the second ones is at most 0.2 of that of the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from statistics import median

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from scheduler.request import Request
from scheduler.sampling import SamplingParams

TARGET = 0.2
USER_TOKENS = 24
VOCABULARY = (1000, 40_000)


async def measure(model: str, policy: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token by kind, `first` and `second`, after a round to warm up."""
    config = EngineConfig(model=model, policy=policy, profile_seconds=0, chunk_size=512)  # type: ignore[arg-type]
    engine = await LocalEngine.start(config)
    rnd = random.Random(0)
    times: dict[str, list[float]] = {"first": [], "second": []}
    try:
        for number in range(rounds + 1):
            system = [rnd.randrange(*VOCABULARY) for _ in range(tokens)]
            for kind, taken in times.items():
                own = [rnd.randrange(*VOCABULARY) for _ in range(USER_TOKENS)]
                seconds = await first_token(engine, f"{kind}-{number}", (*system, *own))
                if number > 0:
                    taken.append(seconds)
    finally:
        await engine.close()
    return times


async def first_token(engine: LocalEngine, name: str, prompt: tuple[int, ...]) -> float:
    started, first = time.perf_counter(), 0.0
    async for delta in engine.generate(Request(name, prompt, 4, SamplingParams(temperature=0.0))):
        if delta.tokens and not first:
            first = time.perf_counter() - started
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", default="chunked", choices=("whole", "chunked"))
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times = asyncio.run(measure(arguments.model, arguments.policy, arguments.tokens, arguments.rounds))
    first, second = median(times["first"]), median(times["second"])
    if arguments.json:
        print(json.dumps({"seconds": times, "ratio": second / first, "target": TARGET}, indent=2))
        return
    print(
        f"system prompt of {arguments.tokens:,} tokens, {USER_TOKENS} of the request's own, {arguments.rounds} rounds"
    )
    print(
        f"TTFT of the first request   {first:8.3f} s  (median; {min(times['first']):.3f} to {max(times['first']):.3f})"
    )
    print(f"TTFT of the second          {second:8.3f} s  ({min(times['second']):.3f} to {max(times['second']):.3f})")
    print(f"ratio {second / first:.3f}, target {TARGET}")


if __name__ == "__main__":
    main()
