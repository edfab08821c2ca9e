"""How budgets follow the machine: a burner of the processor is started and stopped beside the real engine.

    python benchmarks/adaptation.py [--seconds 20] [--burners 1] [--json]

8 streams decode under a bound on every gap, and long prompts come one after another. The decision log is read in three
parts: before, with the burners, and after. For each: budget, predicted and actual duration (medians), iterations that
were late, and how many iterations after the change the first ten in a row were in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.slo import Promise

STREAMS, PROMPT, IN_A_ROW = 8, 2048, 10


def burn() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def burning(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


class Load:
    """Streams that do not end, and a prompt after another."""

    def __init__(self, engine: LocalEngine, promise: Promise) -> None:
        self._engine, self._promise = engine, promise
        self._random = random.Random(0)
        self._tasks = [asyncio.create_task(self._stream(f"stream-{index}")) for index in range(STREAMS)]

    def add_prompts(self) -> None:
        self._tasks.append(asyncio.create_task(self._prompts()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(self, name: str) -> None:
        for turn in range(1000):
            await self._one(f"{name}-{turn}", 64, 1500)

    async def _prompts(self) -> None:
        for turn in range(1000):
            await self._one(f"prompt-{turn}", PROMPT, 1)

    async def _one(self, name: str, prompt: int, tokens: int) -> None:
        ids = tuple(self._random.randrange(1000, self._engine.info.vocab_size) for _ in range(prompt))
        request = Request(name, ids, tokens, SamplingParams(temperature=0.0), promise=self._promise)
        async for _ in self._engine.generate(request):
            pass


async def run(seconds: float, burners: int) -> dict[str, Any]:
    engine = await LocalEngine.start(EngineConfig(policy="slo"))
    step = engine.info.outlook.smallest_tpot_ms[STREAMS] if engine.info.outlook else 60.0
    promise = Promise(600.0, 3.5 * step / 1e3, 3.5 * step / 1e3)
    load = Load(engine, promise)
    await asyncio.sleep(5)
    load.add_prompts()
    await asyncio.sleep(5)
    parts: dict[str, list[dict[str, Any]]] = {}
    for name, count in (("before", 0), ("burning", burners), ("after", 0)):
        print(name, file=sys.stderr)
        seen = (await engine.iterations(-1, 1))[-1]["seq"]
        with burning(count):
            await asyncio.sleep(seconds)
        parts[name] = await engine.iterations(seen, 100_000)
    await load.stop()
    await engine.close()
    found = {name: summary(entries, 1e3 * (promise.tbt_s or 0)) for name, entries in parts.items()}
    return {"promised_gap_ms": round(3.5 * step, 1), "burners": burners, **found}


def summary(entries: list[dict[str, Any]], bound_ms: float) -> dict[str, Any]:
    mixed = [entry for entry in entries if entry["chunks"]]
    late = [entry["actual_ms"] > bound_ms for entry in entries]
    in_time = (index for index in range(len(late)) if not any(late[index : index + IN_A_ROW]))
    return {
        "iterations": len(entries),
        "budget": statistics.median(entry["budget"] for entry in mixed),
        "predicted_ms": round(statistics.median(entry["predicted_ms"] for entry in mixed), 1),
        "actual_ms": round(statistics.median(entry["actual_ms"] for entry in mixed), 1),
        "late_share": round(sum(late) / len(late), 4),
        "in_time_again_after": next(in_time, None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each part")
    parser.add_argument("--burners", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.seconds, arguments.burners))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"no gap above {result['promised_gap_ms']} ms is promised; {result['burners']} burner(s)")
    columns = ("iterations", "budget", "predicted_ms", "actual_ms", "late_share", "in_time_again_after")
    print(f"{'':<10}" + "".join(f"{column.replace('_', ' '):>21}" for column in columns))
    for name in ("before", "burning", "after"):
        print(f"{name:<10}" + "".join(f"{result[name][column]!s:>21}" for column in columns))


if __name__ == "__main__":
    main()
