"""Half an hour of mixed load with clients that go away and processes that are killed: what grows, and what is lost.

    python benchmarks/soak.py [--minutes 30] [--kill-every 180] [--clients 8] [--tp 1] [--json]

Starts a server of its own. Clients ask one after another: prompts and answers of many lengths, greedy and seeded; one
in five goes away in the middle. Every few minutes a process of the engine is ended: a rank, the scheduler, a rank that
is stopped, the replica that owns the engine, in turn. One request in eight is always the same, and has to give the same
text. Every stream whose reader stayed has to come to its end with as many tokens as it asked for. Looked at every few
seconds: resident memory and open files of every process, and what there is of them in shared memory.

Told are, by kind of process, the slope of its memory (least squares, without the first third of its life, of processes
that lived for two minutes at least), open files at the beginning and at the end, and what was lost. Exits with 1 where
anything was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray

from cluster.config import EngineConfig
from deploy import running
from deploy.lifetime import Lifetime

LOOK_EVERY_S = 5.0
SHORTEST_LIFE_S = 120.0
SETTLED = 1 / 3
"""Of a life, after which its memory is looked at."""
ABORTED, CONSTANT = 1 / 5, 1 / 8
MIB = 2**20
KILLS = ("rank", "scheduler", "rank that hangs", "engine replica")


@dataclass
class Life:
    """What was seen of one process."""

    kind: str
    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def slope_mib_per_hour(self) -> float:
        since = self.times[0] + SETTLED * self.seconds
        points = [(t, m) for t, m in zip(self.times, self.memory, strict=True) if t >= since]
        return 3600 / MIB * statistics.linear_regression(*zip(*points, strict=True)).slope


class Observer:
    """Looks at every process below this one, until it is cancelled."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.shared: list[tuple[int, int]] = []

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, IndexError):
                life = self.lives.setdefault(process.pid, Life(""))
                life.kind = kind_of(process)  # a process is told what it is after it has begun
                memory, files = process.memory_info().rss, process.num_fds()
                life.times.append(time.monotonic())
                life.memory.append(memory)
                life.files.append(files)
        self.shared.append(self._shared_memory())

    def _shared_memory(self) -> tuple[int, int]:
        """Files that are named after a process of ours, and their bytes."""
        if not self.lives:
            return 0, 0
        ours = re.compile(rf"(?<!\d)(?:{'|'.join(map(str, self.lives))})(?!\d)")
        sizes = []
        for path in Path("/dev/shm").iterdir():
            with suppress(OSError):
                if ours.search(path.name):
                    sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def figures(self) -> dict[str, Any]:
        kinds: dict[str, Any] = {}
        for kind in sorted({life.kind for life in self.lives.values()}):
            lives = [life for life in self.lives.values() if life.kind == kind and len(life.times) > 1]
            long = [life for life in lives if life.seconds >= SHORTEST_LIFE_S]
            if long:
                steepest = max(long, key=lambda life: life.slope_mib_per_hour)
                kinds[kind] = {
                    "lives": len(lives),
                    "memory_mib": round(steepest.memory[-1] / MIB),
                    "slope_mib_per_hour": round(steepest.slope_mib_per_hour, 1),
                    "over_s": round(steepest.seconds * (1 - SETTLED)),
                    "files_first_last": [long[-1].files[0], long[-1].files[-1]],
                }
        return kinds


def kind_of(process: psutil.Process) -> str:
    """The name that Ray gave it, without what differs from one life to the next."""
    name = process.cmdline()[0].split()[0]
    return name.split("::")[1].split(".")[0] if "::" in name else os.path.basename(name)


@dataclass
class Ledger:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    constant: set[str] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    unfit: list[str] = field(default_factory=list)


async def client(url: str, number: int, until: float, ledger: Ledger) -> None:
    rnd = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as session:
        while time.monotonic() < until:
            constant = rnd.random() < CONSTANT
            body = CONSTANT_BODY if constant else some_body(rnd)
            aborted = not constant and rnd.random() < ABORTED
            outcome, text = await ask(session, body, rnd.randrange(1, 400) if aborted else None)
            ledger.outcomes[outcome.split(":")[0]] += 1
            if outcome.startswith("lost"):
                ledger.lost.append(f"{outcome} ({json.dumps(body)[:80]})")
            if constant and outcome == "complete":
                ledger.constant.add(text)


CONSTANT_BODY: dict[str, Any] = {
    "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True,
    "model": "smollm2", "stream_options": {"include_usage": True},
}  # fmt: skip


def some_body(rnd: random.Random) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": [rnd.randrange(1000, 40_000) for _ in range(int(8 * 60 ** rnd.random()))],
        "max_tokens": int(4 * 16 ** rnd.random()),
        "temperature": rnd.choice([0, 1]),
        "seed": rnd.randrange(2**31),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(session: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> tuple[str, str]:
    """What came of it, and the text. A reader that leaves does so after so many characters of the answer."""
    received = ""
    try:
        async with session.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in (429, 503):
                return f"refused: {response.status_code}", ""
            if response.status_code != 200:
                return f"lost: status {response.status_code}", ""
            async for piece in response.aiter_text():
                received += piece
                if leave_after is not None and len(received) > leave_after:
                    return "left", ""
    except httpx.HTTPError as error:
        return f"lost: {type(error).__name__}", ""
    return judged(received, body)


def judged(received: str, body: dict[str, Any]) -> tuple[str, str]:
    events = [json.loads(block[6:]) for block in received.split("\n\n") if block.startswith("data: {")]
    if any("error" in event for event in events):
        return f"lost: {events[-1]['error']['message']}", ""
    usage: dict[str, Any] = next((event["usage"] for event in events if event.get("usage")), {})
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    if not received.endswith("data: [DONE]\n\n") or usage.get("completion_tokens") != body["max_tokens"]:
        return f"lost: {usage.get('completion_tokens')} of {body['max_tokens']} tokens", text
    return "complete", text


async def killer(server: running.Server, every_s: float, until: float, ledger: Ledger) -> None:
    rnd = random.Random(0)
    for kind in itertools.cycle(KILLS):
        if time.monotonic() + every_s > until:
            return
        await asyncio.sleep(every_s)
        try:
            await asyncio.to_thread(kill, server, kind, rnd)
        except ray.exceptions.RayError as error:  # it has not come back from the last one
            ledger.unfit.append(f"{kind}: {type(error).__name__}")
            continue
        ledger.kills[kind] += 1
        print(f"killed: {kind}", file=sys.stderr, flush=True)


def kill(server: running.Server, kind: str, rnd: random.Random) -> None:
    scheduler: Any = server._scheduler
    if kind == "scheduler":
        os.kill(ray.get(scheduler.pid.remote(), timeout=30), signal.SIGKILL)
    elif kind == "engine replica":
        title = f"ServeReplica:{running.APPLICATION}:Engine"
        here = psutil.Process().children(recursive=True)
        (replica,) = [process for process in here if process.cmdline() and title in process.cmdline()[0]]
        replica.kill()
    else:
        pids = [pid for group in ray.get(scheduler.pids.remote(), timeout=30) for pid in group]
        os.kill(rnd.choice(pids), signal.SIGSTOP if "hangs" in kind else signal.SIGKILL)


async def soak(server: running.Server, arguments: argparse.Namespace) -> dict[str, Any]:
    ledger, observer = Ledger(), Observer()
    until = time.monotonic() + 60 * arguments.minutes
    observing = asyncio.create_task(observer.run())
    clients = [client(server.address.url, number, until, ledger) for number in range(arguments.clients)]
    await asyncio.gather(*clients, killer(server, arguments.kill_every, until, ledger))
    observing.cancel()
    await asyncio.gather(observing, return_exceptions=True)
    stats: Any = await asyncio.to_thread(lambda: ray.get(server._scheduler.stats.remote()))
    if stats["blocks_free"] != stats["blocks_total"]:
        ledger.lost.append(f"{stats['blocks_total'] - stats['blocks_free']} blocks")
    if len(ledger.constant) > 1:
        ledger.lost.append(f"one request, {len(ledger.constant)} answers")
    return {
        "minutes": arguments.minutes,
        "requests": dict(ledger.outcomes),
        "kills": dict(ledger.kills),
        "not_killed": ledger.unfit,
        "lost": ledger.lost,
        "processes": observer.figures(),
        "shared_memory_files_first_last": [observer.shared[0][0], observer.shared[-1][0]],
        "shared_memory_mib_first_last": [round(observer.shared[i][1] / MIB, 1) for i in (0, -1)],
    }


def show(told: dict[str, Any]) -> None:
    print(f"{told['minutes']:g} minutes; requests: {told['requests']}; kills: {told['kills']}; lost: {told['lost']}")
    print(f"\n{'process':<44}{'lives':>6}{'MiB':>8}{'MiB/hour':>10}{'over s':>8}  open files, first and last")
    for kind, row in told["processes"].items():
        first, last = row["files_first_last"]
        print(
            f"{kind:<44}{row['lives']:>6}{row['memory_mib']:>8}{row['slope_mib_per_hour']:>10}{row['over_s']:>8}"
            f"  {first} {last}"
        )
    print(f"\n/dev/shm, first and last: {told['shared_memory_files_first_last']} files,", end=" ")
    print(f"{told['shared_memory_mib_first_last']} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kill-every", type=float, default=180, help="seconds")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--hang-seconds", type=float, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = EngineConfig(tp=arguments.tp, hang_seconds=arguments.hang_seconds)
    with Lifetime() as life:
        server = life.run(
            lambda: running.start(
                life, config, running.Address("127.0.0.1", 0), say=lambda s: print(s, file=sys.stderr)
            )
        )
        told = asyncio.run(soak(server, arguments))
    print(json.dumps(told, indent=2)) if arguments.json else show(told)
    sys.exit(bool(told["lost"]))


if __name__ == "__main__":
    main()
