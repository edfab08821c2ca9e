"""Ten times what a server can sustain, for a minute: what it lets in, what it refuses, and how it is afterwards.

    python benchmarks/overload.py [--json] [--seconds 60] [--times 10] [--model smollm2] [--on-infeasible reject]

Starts a server of its own with its default promises. A closed loop of 8 finds the sustainable rate; then Poisson
arrivals at --times that rate. Meanwhile /health is asked, a small request is sent, and the memory of every process of
the server is looked at, twice a second. Told are: how many requests were admitted and how many refused with 429, the
share of the admitted ones that kept the server's own promise (TTFT, TPOT, largest gap), the slowest /health, the growth
of memory, and how long after the last arrival a small request was admitted and had its promise kept.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import psutil

from cluster.config import EngineConfig
from cluster.workloads import ClosedLoop, OpenLoop, PlannedRequest, Uniform, poisson, requests
from deploy import running
from deploy.bench import RunRecord, Target, drive, figures
from deploy.bench.record import Outcome, RequestRecord
from deploy.compare.promised import Promises, lengths_of, targets_of
from deploy.lifetime import Lifetime
from scheduler.slo import Promise

PROMPTS, ANSWERS = Uniform(16, 256), Uniform(8, 32)
AT_ONCE, OF_CLOSED_LOOP = 8, 32
EVERY_S = 0.5
NO_HURRY = {"ttft_ms": 600_000, "tpot_ms": 60_000}
"""Asked for where no promise is wanted: the closed loop, and what the load test tries before it begins."""
PROBE_TOKENS = 32
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Outcomes:
    """`attainment`: of the admitted requests. Memory is the resident set of all processes of the server together."""

    sustainable_per_s: float
    offered_per_s: float
    seconds: float
    requests: int
    admitted: int
    refused: int
    other: dict[str, int]
    probes_refused: int
    without_retry_after: int
    attainment: float
    slowest_health_s: float
    unhealthy: int
    memory_before_mib: float
    memory_most_mib: float
    memory_after_mib: float
    normal_again_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A request from beside the load. `kept`: whether it was admitted and its promise kept."""

    sent: float
    ended: float
    status: int
    retry_after: str | None
    kept: bool


class Watch:
    """Looks at a server from beside the load, until it is cancelled. Times are of `time.perf_counter`."""

    def __init__(self, server: running.Server) -> None:
        self._server = server
        self.health_s: list[float] = []
        self.unhealthy = 0
        self.memory: list[int] = []
        self.probes: list[Probe] = []

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.address.url, timeout=120, trust_env=False) as client:
            await asyncio.gather(self._health(client), self._memory(), self._probes(client))

    async def _health(self, client: httpx.AsyncClient) -> None:
        while True:
            begun = time.perf_counter()
            answer = await client.get("/health")
            self.health_s.append(time.perf_counter() - begun)
            self.unhealthy += answer.status_code != 200
            await asyncio.sleep(EVERY_S)

    async def _memory(self) -> None:
        while True:
            self.memory.append(await asyncio.to_thread(resident_bytes))
            await asyncio.sleep(EVERY_S)

    async def _probes(self, client: httpx.AsyncClient) -> None:
        (promise,) = await asyncio.to_thread(self._server.promises, [PROBE_TOKENS])
        for number in itertools.count():
            self.probes.append(await probe(client, self._server.info.served_model_name, number, promise))
            await asyncio.sleep(EVERY_S)


async def probe(client: httpx.AsyncClient, model: str, number: int, promise: Promise | None) -> Probe:
    prompt = [1000 + (31 * number + i) % 40_000 for i in range(PROBE_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
    sent = time.perf_counter()
    answer = await client.post("/v1/completions", json=body)
    ended = time.perf_counter()
    kept = answer.status_code == 200 and (promise is None or ended - sent <= promise.ttft_s)
    return Probe(sent, ended, answer.status_code, answer.headers.get("Retry-After"), kept)


def resident_bytes() -> int:
    """Of all processes below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def planned(count: int, rate: float, seed: int) -> list[PlannedRequest]:
    times = [at for at, _ in zip(poisson(rate, 10.0 * count / rate, seed=seed), range(count), strict=False)]
    return requests(times, PROMPTS, ANSWERS, seed=seed)


async def sustainable(target: Target) -> float:
    """Requests a second that a closed loop gets through."""
    load = ClosedLoop(requests([0.0] * OF_CLOSED_LOOP, PROMPTS, ANSWERS, seed=1), AT_ONCE)
    return figures(await drive(target, load, warmup=2)).requests_per_s


def promises_of(server: running.Server, load: OpenLoop) -> Promises:
    lengths = sorted(lengths_of(load))
    found = server.promises(lengths)
    return Promises({n: targets_of(p) for n, p in zip(lengths, found, strict=True) if p is not None})


def refused(record: RequestRecord) -> bool:
    return record.outcome is Outcome.FAILED and "429" in (record.error or "")


async def measure(server: running.Server, seconds: float, times: float) -> Outcomes:
    target = Target(server.address.url, extra={"slo": NO_HURRY})
    rate = await sustainable(target)
    offered = times * rate
    load = OpenLoop(planned(round(offered * seconds), offered, 2))
    say(f"sustainable: {rate:.2f} requests/s; now {offered:.1f}/s, {len(load.requests)} requests")
    promises = await asyncio.to_thread(promises_of, server, load)
    before = resident_bytes()
    watch = Watch(server)
    watching = asyncio.create_task(watch.run())
    run = promises.judging(await drive(target, promises.asked_in(load)))
    last_arrival = time.perf_counter() - run_ended(run) + max(record.sent_s for record in run.requests)
    normal_s = await until_normal(watch, last_arrival)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    admitted = replace(run, requests=tuple(r for r in run.requests if r.outcome is Outcome.FINISHED))
    told = figures(run)
    return Outcomes(
        sustainable_per_s=rate,
        offered_per_s=offered,
        seconds=seconds,
        requests=len(run.requests),
        admitted=len(admitted.requests),
        refused=sum(map(refused, run.requests)),
        other={kind: count for kind, count in told.errors.items() if "429" not in kind},
        probes_refused=sum(p.status == 429 for p in watch.probes),
        without_retry_after=sum(p.status == 429 and p.retry_after is None for p in watch.probes),
        attainment=figures(admitted).attainment or 0.0,
        slowest_health_s=max(watch.health_s),
        unhealthy=watch.unhealthy,
        memory_before_mib=before / MIB,
        memory_most_mib=max(watch.memory) / MIB,
        memory_after_mib=resident_bytes() / MIB,
        normal_again_s=normal_s,
    )


async def until_normal(watch: Watch, since: float) -> float:
    """Seconds from then until a request that was sent later was admitted and kept its promise."""
    while True:
        for one in watch.probes:
            if one.sent > since and one.kept:
                return one.ended - since
        await asyncio.sleep(0.05)


def run_ended(run: RunRecord) -> float:
    return max(record.ended_s for record in run.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--on-infeasible", default="reject", choices=("reject", "relax", "best-effort"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = EngineConfig(model=arguments.model, policy="slo", on_infeasible=arguments.on_infeasible)
    with Lifetime() as life:
        server = life.run(lambda: running.start(life, config, running.Address("127.0.0.1", 0), say=say))
        found = asyncio.run(measure(server, arguments.seconds, arguments.times))
    told: dict[str, Any] = asdict(found)
    print(
        json.dumps(told, indent=2) if arguments.json else "\n".join(f"{name}: {value}" for name, value in told.items())
    )


if __name__ == "__main__":
    main()
