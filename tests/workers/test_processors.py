"""Which processors the threads of a forward run on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.workers.scripts import output_of

SCRIPT = """
import json, os, sys, threading
from workers.compute_thread import ComputeThread
from workers.config import WorkerConfig
from workers.processors import hold_processors
from workers.worker import Worker

folder, threads, alone, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "alone", int(sys.argv[4])
compute = ComputeThread()
worker = Worker(WorkerConfig(model_dir=folder, device="cpu", threads=threads, alone_on_host=alone and not rank))
compute.run(worker.load)
if rank:
    compute.run(hold_processors, threads, rank, rank + 1)
tasks = [(task, open(f"/proc/self/task/{task}/comm").read().strip()) for task in os.listdir("/proc/self/task")]
print(json.dumps({
    "compute": sorted(os.sched_getaffinity(compute.run(threading.get_native_id))),
    "team": [sorted(os.sched_getaffinity(int(task))) for task, name in tasks if name == "forward"],
    "others": [sorted(os.sched_getaffinity(int(task))) for task, name in tasks if name != "forward"],
}))
"""
ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs Linux and two processors")


def affinities(folder: Path, threads: int, alone: bool, rank: int = 0) -> dict[str, list[list[int]]]:
    """In a process of its own: what is bound stays so."""
    told = output_of(SCRIPT, folder, threads, "alone" if alone else "one of several", rank)
    found: dict[str, list[list[int]]] = json.loads(told)
    return found


def test_threads_that_take_the_whole_machine_stay_on_a_processor_each(tiny_model_dir: Path) -> None:
    found = affinities(tiny_model_dir, len(ALL), alone=True)
    assert found["compute"] == ALL[:1]
    others = [processors for processors in found["team"] if processors != ALL[:1]]
    assert len(others) >= len(ALL) - 1
    assert {processor for processors in others for processor in processors} == set(ALL[1:])
    assert all(len(processors) == 1 for processors in others)
    assert all(processors == ALL for processors in found["others"])


@pytest.mark.parametrize(("threads", "alone"), [(1, True), (len(ALL), False)])
def test_threads_that_have_to_share_go_where_there_is_room(tiny_model_dir: Path, threads: int, alone: bool) -> None:
    found = affinities(tiny_model_dir, threads, alone)
    assert all(processors == ALL for kind in ("team", "others") for processors in found[kind])


@pytest.mark.skipif(len(ALL) % 2 != 0, reason="two ranks cannot have as many processors each")
def test_each_rank_has_its_own(tiny_model_dir: Path) -> None:
    half = len(ALL) // 2
    found = affinities(tiny_model_dir, half, alone=True, rank=1)
    assert found["compute"] == [ALL[half]]
    assert {processor for processors in found["team"] for processor in processors} == set(ALL[half:])
    assert all(processors == ALL for processors in found["others"])
