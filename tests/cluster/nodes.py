"""Three Ray nodes on this machine, a worker group on one of them, and that node's raylet killed while streams run.

A program of its own, for a process is connected to one Ray: python -m tests.cluster.nodes MODEL_DIR TRANSPORT.
Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from cluster.local_ray import prepare_environment
from tests.cluster.test_ray import running, tiny, until
from tests.cluster.test_rebuild import Seen, all_tokens, ranks, wanted

STREAMS = 32


def start_nodes() -> Cluster:
    """The head has no room for ranks, each of the two others for two."""
    prepare_environment()
    quiet = {"include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.connect()
    return cluster


def raylet_of(pid: int) -> int:
    """The process that a worker's node stands and falls with is its parent."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    assert parent.name() == "raylet", parent
    return parent.pid


def is_alive(pid: int) -> bool:
    """One that has ended and whose parent has died too may be listed as long as nobody asks how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(pids: list[int]) -> float:
    """Seconds until none of them runs any more."""
    begun = time.monotonic()
    while any(map(is_alive, pids)):  # noqa: ASYNC110 - they are nobody's children any more
        await asyncio.sleep(0.1)
    return time.monotonic() - begun


async def longest_pause(seen: Seen, all_tokens: int) -> float:
    """Seconds in which no stream got a token."""
    longest, count, since = 0.0, seen.count, time.monotonic()
    while count < all_tokens:
        await asyncio.sleep(0.01)
        if seen.count != count:
            longest, count, since = max(longest, time.monotonic() - since), seen.count, time.monotonic()
    return longest


async def kill_a_node(model_dir: Path, transport: str) -> dict[str, Any]:
    requests = wanted(STREAMS, 110)
    config = tiny(
        model_dir, tp=2, policy="chunked", chunk_size=512, max_running=STREAMS, num_blocks=2500, transport=transport
    )
    async with running(config) as engine:
        undisturbed = await all_tokens(engine, requests, "")
        seen = Seen()
        streams = asyncio.create_task(all_tokens(engine, requests, "-again", seen))
        await until(engine, running=STREAMS)
        before = await ranks(engine)
        raylets = {raylet_of(pid) for pid in before}
        scheduler: int = await engine.scheduler.pid.remote()
        for raylet in raylets:
            os.kill(raylet, signal.SIGKILL)
        got, pause_s = await asyncio.gather(streams, longest_pause(seen, STREAMS * 110))
        after = await ranks(engine)
        now: int = await engine.scheduler.pid.remote()
        lingered_s = await until_gone(before if now == scheduler else [*before, scheduler])
        stats = await engine.stats()
        return {
            "differ": sum(a != b for a, b in zip(undisturbed, got, strict=True)),
            "killed_raylets": len(raylets),
            "scheduler_moved": scheduler != now,
            "new_ranks": not set(before) & set(after),
            "old_ranks_lingered_s": lingered_s,
            "elsewhere": not raylets & {raylet_of(pid) for pid in after},
            "transport": engine.info.transport,
            "blocks": [stats["blocks_free"], stats["blocks_total"]],
            "incidents": stats["incidents"],
            "longest_pause_s": pause_s,
        }


def main() -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    cluster = start_nodes()
    try:
        print(json.dumps(asyncio.run(kill_a_node(Path(sys.argv[1]), sys.argv[2]))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
