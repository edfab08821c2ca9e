"""What separated groups do to streams when a long prompt comes, and what moving its KV takes: on this machine, beside
the same number of colocated groups.

    python -m benchmarks.separated [--prompt 2048] [--streams 4]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from itertools import pairwise
from statistics import median
from typing import Any

import ray

from cluster.async_cluster import AsyncCluster
from cluster.config import EngineConfig
from scheduler.request import Request
from scheduler.sampling import SamplingParams

LEAD, OUTPUT = 24, 400


async def stream(cluster: AsyncCluster, name: str, prompt: int, tokens: int, seen: list[float]) -> None:
    """`seen` gets the times of its tokens."""
    ids = tuple(2 + (37 * i + 101 * sum(map(ord, name))) % 40_000 for i in range(prompt))
    request = Request(name, ids, tokens, SamplingParams(temperature=0.0))
    async for delta in cluster.generate(request):
        seen += [time.perf_counter()] * len(delta.tokens)


async def run(config: EngineConfig, prompt: int, streams: int) -> dict[str, Any]:
    cluster = await AsyncCluster.start(config)
    try:
        await stream(cluster, "warm", 300, 8, [])
        times: list[list[float]] = [[] for _ in range(streams)]
        tasks = [asyncio.create_task(stream(cluster, f"s{i}", 64, OUTPUT, seen)) for i, seen in enumerate(times)]
        while min(map(len, times)) < LEAD:  # noqa: ASYNC110 - tokens come in many tasks
            await asyncio.sleep(0.01)
        asked, long = time.perf_counter(), list[float]()
        await stream(cluster, "long", prompt, 16, long)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gaps = [b - a for seen in times for a, b in pairwise(seen) if asked < b < long[0]]
        entries = await cluster.iterations(-1, 4096)
        moved = [each for entry in entries for each in entry.get("transfers", ()) if each["request"] == "long"]
    finally:
        await cluster.close()
    return {
        "TTFT of the long prompt": f"{long[0] - asked:.2f} s",
        "its first to its second token": f"{1e3 * (long[1] - long[0]):.0f} ms",
        "gaps of the streams meanwhile": f"median {1e3 * median(gaps):.0f} ms, largest {1e3 * max(gaps):.0f} ms"
        f" (n = {len(gaps)})",
        **({"its KV": told(moved[0])} if moved else {}),
    }


def told(moved: dict[str, Any]) -> str:
    rate = moved["bytes"] / moved["send_ms"] * 1e3 if moved["send_ms"] else 0.0
    return (
        f"{moved['bytes'] / 2**20:.1f} MiB of {moved['tokens']} tokens in {moved['send_ms']:.0f} ms of sending "
        f"({rate / 1e6:.0f} MB/s), {100 * moved['early_bytes'] / moved['bytes']:.0f} % of it before the first token, "
        f"with the decode group {moved['wait_ms']:.1f} ms after it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--chunk-size", type=int, default=128)
    asked = parser.parse_args()
    common = {"policy": "chunked", "chunk_size": asked.chunk_size, "profile_seconds": 0, "threads": 1}
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for name, mode in (("colocated, 2 groups", {"groups": 2}), ("separated, 1 + 1", {"mode": "separated"})):
        print(name, flush=True)
        config = EngineConfig(**{**common, **mode})  # type: ignore[arg-type]
        for what, figure in asyncio.run(run(config, asked.prompt, asked.streams)).items():
            print(f"  {what}: {figure}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
