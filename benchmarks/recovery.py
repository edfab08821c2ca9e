"""What a death costs: streams that run, one process that is killed, and how long the streams stand still.

    python benchmarks/recovery.py [--json] [--streams 32] [--kills 3] [--kinds rank,hung,scheduler] [--tp 2]

On a local Ray with the embedded model. Each kind starts an engine of its own, runs the streams once undisturbed and
then with kills at random points, and compares every token. Told are, for each kill, how long it was until any stream
got a token again (recovery), the longest pause of any stream (which also waits for the tokens of all others to be
computed again), and how long the engine took to load. Target: recovery in 15 s at most beyond the load time, and no
token lost or twice.

rank: kill -9 of one rank. hung: kill -STOP of one, with --hang-seconds, which is part of what is told. scheduler:
kill -9 of the scheduler actor, which takes its worker groups along.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
import random
import signal
import time
from dataclasses import asdict, dataclass, replace

import ray

from cluster.async_cluster import AsyncCluster
from cluster.config import EngineConfig
from scheduler.request import Request
from scheduler.sampling import SamplingParams

KINDS = ("rank", "hung", "scheduler")
TARGET_S = 15.0
UNDER_WAY_S = 2.0
"""Tokens that come so soon after a kill were on their way."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`recoveries_s`: from each kill to the first token of any stream. `pauses_s`: the longest gap of any stream around
    it. `load_s` is a whole start of the engine, measured before. `wrong` streams differ from the undisturbed run."""

    kind: str
    load_s: float
    recoveries_s: list[float]
    pauses_s: list[float]
    streams: int
    wrong: int

    @property
    def beyond_load_s(self) -> float:
        return max(self.recoveries_s) - self.load_s


class Streams:
    """The same requests, run with what a test does to them; when each token came, and which it was."""

    def __init__(self, cluster: AsyncCluster, requests: list[Request]) -> None:
        self._cluster = cluster
        self._requests = requests
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.arrivals: dict[str, list[float]] = {request.request_id: [] for request in requests}

    async def run(self, suffix: str) -> list[list[int]]:
        await asyncio.gather(*(self._run(request, suffix) for request in self._requests))
        return [self.tokens[request.request_id] for request in self._requests]

    async def _run(self, request: Request, suffix: str) -> None:
        name = request.request_id
        async for delta in self._cluster.generate(replace(request, request_id=name + suffix)):
            self.tokens[name] += delta.tokens
            self.arrivals[name] += [time.monotonic()] * len(delta.tokens)

    def longest_pause(self, around: float) -> float:
        """Of any stream, the gap that holds this moment."""
        return max(
            (b - a for times in self.arrivals.values() for a, b in itertools.pairwise(times) if a <= around < b),
            default=0.0,
        )

    def recovery(self, killed: float) -> float:
        """Seconds until a token came that was not on its way before."""
        after = [t for times in self.arrivals.values() for t in times if t > killed + UNDER_WAY_S]
        return min(after, default=math.inf) - killed

    async def progress(self) -> None:
        """Until every stream that is not at its end has had two more tokens."""
        wanted = {r.request_id: min(len(self.tokens[r.request_id]) + 2, r.max_tokens) for r in self._requests}
        while any(len(self.tokens[name]) < count for name, count in wanted.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def requests(count: int, max_tokens: int) -> list[Request]:
    return [
        Request(
            f"r{number}",
            tuple((37 * i + number) % 40_000 for i in range(16 + number)),
            max_tokens,
            SamplingParams(temperature=number % 2, seed=number, top_k=4),
        )
        for number in range(count)
    ]


async def kill(cluster: AsyncCluster, kind: str, rnd: random.Random) -> None:
    if kind == "scheduler":
        os.kill(await cluster.scheduler.pid.remote(), signal.SIGKILL)
        return
    (pids,) = await cluster.scheduler.pids.remote()
    os.kill(rnd.choice(pids), signal.SIGKILL if kind == "rank" else signal.SIGSTOP)


async def measure(kind: str, config: EngineConfig, streams: int, kills: int, max_tokens: int) -> Outcome:
    rnd = random.Random(0)
    begun = time.monotonic()
    cluster = await AsyncCluster.start(config)
    load_s = time.monotonic() - begun
    if kind == "hung":  # the bound follows from what iterations cost, and measuring that is no part of loading
        await cluster.close()
        cluster = await AsyncCluster.start(config.model_copy(update={"profile_seconds": 15.0}))
    try:
        asked = requests(streams, max_tokens)
        undisturbed = await Streams(cluster, asked).run("-undisturbed")
        disturbed = Streams(cluster, asked)
        running = asyncio.create_task(disturbed.run("-disturbed"))
        moments = []
        for _ in range(kills):
            await disturbed.progress()
            await asyncio.sleep(rnd.uniform(0, 1))
            if running.done():
                break
            moments.append(time.monotonic())
            await kill(cluster, kind, rnd)
            await disturbed.progress()
        got = await running
    finally:
        await cluster.close()
    wrong = sum(a != b for a, b in zip(undisturbed, got, strict=True))
    recoveries = [disturbed.recovery(moment) for moment in moments]
    pauses = [disturbed.longest_pause(moment) for moment in moments]
    return Outcome(kind, load_s, recoveries, pauses, streams, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--transport", default="auto", choices=("auto", "actor", "compiled"))
    parser.add_argument("--hang-seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model, tp=arguments.tp, transport=arguments.transport, policy="chunked", profile_seconds=0,
        max_running=arguments.streams, hang_seconds=arguments.hang_seconds,
    )  # fmt: skip
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    outcomes = [
        asyncio.run(measure(kind, config, arguments.streams, arguments.kills, arguments.max_tokens))
        for kind in arguments.kinds.split(",")
    ]
    ray.shutdown()
    if arguments.json:
        told = [{**asdict(outcome), "beyond_load_s": outcome.beyond_load_s} for outcome in outcomes]
        print(json.dumps({"target_s": TARGET_S, "outcomes": told}, indent=2))
        return
    print(f"{arguments.streams} streams, tp {arguments.tp}; target: at most {TARGET_S:g} s beyond the load time")
    for o in outcomes:
        recoveries = ", ".join(f"{seconds:.1f}" for seconds in o.recoveries_s)
        pauses = ", ".join(f"{seconds:.1f}" for seconds in o.pauses_s)
        print(
            f"{o.kind:10s} recovered after {recoveries} s; loading took {o.load_s:.1f} s, so {o.beyond_load_s:+.1f} s "
            f"beyond it; longest pauses {pauses} s; {o.wrong} of {o.streams} streams differ"
        )


if __name__ == "__main__":
    main()
