"""What serving costs beside computing: a decode step over HTTP against the bare one, by part, and the idle server.

    python -m benchmarks.serving_cost [--rounds 5] [--json]

One worker in this process and one server, the embedded model. In each round, for 8 and for 32 streams, the bare worker
decodes and then as many streams are read from the server; what is compared is compared within the round.

* step: between two tokens of a stream by the client's clock; of it, in the server's decision log,
* forward: in the rank, and rest of the iteration: schedule, encode, dispatch, gather, commit. What is left of the step
  is the way to the client: fan-out, detokenization, HTTP.
* processor time of each process while 8 streams are read, and of all of them while nobody asks anything.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import httpx
import psutil

from benchmarks.command import run_rounds
from benchmarks.forward import CONTEXT, Bench
from cluster.config import EngineConfig
from cluster.workloads import ClosedLoop, Fixed, requests
from deploy import running
from deploy.bench import Target, drive, figures, loop
from deploy.lifetime import Lifetime

STREAMS = {8: 1.10, 32: 1.15}
"""And how many times the bare step a served one is meant to take at most."""
TOKENS = 96
IDLE_S = 10.0
IDLE_SHARE = 0.25
STEADY = slice(8, -8)
"""Of an iteration log: without the steps in which streams come and go."""


class Serving:
    def __init__(self, server: running.Server) -> None:
        self.target = Target(server.address.url)
        self.log = f"{server.address.url}/v1/stallfree/iterations"
        self.bare = Bench()
        self._seed = 0

    async def round(self, streams: int) -> dict[str, float]:
        """Milliseconds of one bare and one served step, by part."""
        self.bare.fill(range(streams), CONTEXT)
        bare = statistics.median(self.bare.decode(streams) for _ in range(4))
        self.bare.empty(range(streams))
        self._seed += 1
        load = ClosedLoop(requests([0.0] * streams, Fixed(CONTEXT), Fixed(TOKENS), seed=self._seed), streams)
        step = figures(await drive(self.target, load)).itl.p50
        assert step is not None  # there are tokens
        async with httpx.AsyncClient(trust_env=False) as client:
            log = (await client.get(self.log, params={"after": -1, "limit": TOKENS})).json()
        plain = [entry for entry in log["data"] if entry["decodes"] == streams and not entry["chunks"]][STEADY]
        forward = statistics.median(entry["forward_ms"] for entry in plain)
        iteration = statistics.median(entry["actual_ms"] for entry in plain)
        return {
            "bare": 1e3 * bare,
            "step": 1e3 * step,
            "forward": forward,
            "rest_of_iteration": iteration - forward,
            "way_to_client": 1e3 * step - iteration,
        }

    async def busy(self) -> dict[str, float]:
        """Share of a processor that each kind of process takes while 8 streams are read."""
        before, began = processor_seconds(), time.monotonic()
        await self.round(8)
        spent = time.monotonic() - began
        return {name: (s - before.get(name, 0.0)) / spent for name, s in processor_seconds().items()}


def processor_seconds() -> dict[str, float]:
    """By what the processes below this one call themselves."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        try:
            times, command = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        name = command[0].partition(".")[0] if command and command[0].startswith("ray::") else "Ray's own"
        found[name] += times.user + times.system
    return dict(found)


def idle() -> dict[str, float]:
    before = processor_seconds()
    time.sleep(IDLE_S)
    return {name: (s - before.get(name, 0.0)) / IDLE_S for name, s in processor_seconds().items()}


async def measure(server: running.Server, rounds: int) -> dict[str, Any]:
    serving = Serving(server)
    rows = []
    for streams, most in STREAMS.items():
        await serving.round(streams)
        taken = [await serving.round(streams) for _ in range(rounds)]
        parts = {name: round(statistics.median(each[name] for each in taken), 2) for name in taken[0]}
        ratio = statistics.median(each["step"] / each["bare"] for each in taken)
        rows.append(
            {"streams": streams, "ratio": round(ratio, 3), "at_most": most, "holds": ratio <= most, "ms": parts}
        )
    busy = await serving.busy()
    quiet = await asyncio.to_thread(idle)
    return {
        "rounds": rounds,
        "rows": rows,
        "busy_share_of_a_processor": {name: round(share, 4) for name, share in sorted(busy.items())},
        "idle_share_of_a_processor": {name: round(share, 4) for name, share in sorted(quiet.items())},
        "idle_total": round(sum(quiet.values()), 3),
        "idle_at_most": IDLE_SHARE,
        "idle_holds": sum(quiet.values()) <= IDLE_SHARE,
    }


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in row["ms"].items())
        verdict = "" if row["holds"] else "  MISSED"
        print(f"{row['streams']:>3} streams: served / bare {row['ratio']:.3f}, at most {row['at_most']}{verdict}")
        print(f"    ms: {parts}")
    print("\nshare of a processor  busy   idle")
    for name, share in result["busy_share_of_a_processor"].items():
        print(f"{name:<20}{share:>7.1%}{result['idle_share_of_a_processor'].get(name, 0.0):>7.1%}")
    verdict = "" if result["idle_holds"] else "  MISSED"
    print(f"idle, all together: {result['idle_total']:.1%}, at most {IDLE_SHARE:.0%}{verdict}")


def serve_and_measure(rounds: int) -> dict[str, Any]:
    config = EngineConfig(policy="chunked", profile_seconds=0, num_blocks=1024)
    address = running.Address("127.0.0.1", 0)
    with Lifetime() as life:
        server = life.run(lambda: running.start(life, config, address, say=lambda line: print(line, file=sys.stderr)))
        return loop.run(measure(server, rounds))


if __name__ == "__main__":
    run_rounds(__doc__, 5, serve_and_measure, show)
