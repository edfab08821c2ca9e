"""What tensor parallelism on CPU costs in communication: a decode step of 8 streams on two ranks of this host.

    python -m benchmarks.tensor_parallel [--rounds 5] [--json]

Two processes, the embedded model, half of the processors each. In each round both ways take some steps in turn: memory
that the ranks share, and gloo over TCP. Communication is the time that a rank spends in collectives: also what it waits
there for the other, which has twice as many KV heads (3 are not divided evenly by 2).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torch import Tensor

from benchmarks.command import run_rounds
from benchmarks.forward import CONTEXT, Bench
from deploy.ports import check_port
from scheduler.plan import Forward
from workers.checkpoint import resolve
from workers.config import WorkerConfig

RANKS, STREAMS, STEPS = 2, 8, 6
MOST = 0.25
"""Share of the step that communication is meant to take at most."""


class Clock:
    """Around a function: seconds spent in it."""

    def __init__(self, call: Any) -> None:
        self._call, self.spent = call, 0.0

    def __call__(self, *arguments: Any) -> Tensor:
        started = time.perf_counter()
        result: Tensor = self._call(*arguments)
        self.spent += time.perf_counter() - started
        return result


def run_rank(rank: int, rendezvous: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """In a process of its own: (step, of it in collectives) of each round, by the way that was taken."""
    threads = max(1, (os.cpu_count() or 1) // RANKS)
    where = {"rendezvous": rendezvous, "threads": threads, "alone_on_host": True}
    config = WorkerConfig(str(resolve("smollm2")), rank, RANKS, max_running=33, **where)  # type: ignore[arg-type]
    bench = Bench(config)
    ranks: Any = bench.worker.ranks
    ranks.sum, ranks.gather_columns = Clock(ranks.sum), Clock(ranks.gather_columns)
    ways = {"shared memory": ranks.shared, "gloo": None}
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    bench.fill(range(STREAMS), CONTEXT)
    for number in range(rounds + 1):
        for way, shared in ways.items():
            ranks.shared = shared
            steps = []
            for _ in range(STEPS):
                before = ranks.sum.spent + ranks.gather_columns.spent
                step = bench.run(Forward(tuple(range(STREAMS))))
                steps.append((step, ranks.sum.spent + ranks.gather_columns.spent - before))
            if number:
                taken[way].append((statistics.median(s for s, _ in steps), statistics.median(c for _, c in steps)))
    bench.worker.close()
    return taken


def measure(rounds: int) -> dict[str, Any]:
    rendezvous = f"tcp://127.0.0.1:{check_port('127.0.0.1', 0)}"
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool:
        of_ranks = [task.result() for task in [pool.submit(run_rank, r, rendezvous, rounds) for r in range(RANKS)]]
    rows = []
    for way in of_ranks[0]:
        pairs = [pair for taken in of_ranks for pair in taken[way]]
        share = statistics.median(spent / step for step, spent in pairs)
        step, spent = (statistics.median(column) for column in zip(*pairs, strict=True))
        row = {"way": way, "share": round(share, 3), "ms": [round(1e3 * spent, 2), round(1e3 * step, 2)]}
        rows.append({**row, "at_most": MOST, "holds": share <= MOST})
    return {"rounds": rounds, "streams": STREAMS, "ranks": RANKS, "rows": rows}


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        spent, step = row["ms"]
        verdict = "" if row["holds"] else "  MISSED"
        print(
            f"{row['way']:<14} {spent:.1f} of {step:.1f} ms: {row['share']:.0%}, at most {row['at_most']:.0%}{verdict}"
        )


if __name__ == "__main__":
    run_rounds(__doc__, 5, measure, show)
