"""What scheduling itself costs: one schedule plus commit, with many running and as many waiting sequences.

    python benchmarks/scheduling.py [--json]

Every running sequence decodes and the waiting ones find no slot, so that each iteration has work for all. Median of the
iterations, in milliseconds, for each policy that fuses; targets: 0.5 ms at 256 + 256, 2 ms at 1,000 + 1,000.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.plan import IterationResult
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.slo import Promise

COST = Coefficients(0.002, 0.01, 1e-5, 1e-9, 1e-11, 1e-6, 2.0)
SIZES = (64, 256, 1000)
TARGETS_MS = {256: 0.5, 1000: 2.0}
ITERATIONS = 60


def measure(policy: str, running: int, waiting: int) -> float:
    """Milliseconds of one schedule plus commit."""
    config = SchedulerConfig(
        num_blocks=(running + 1) * 40,
        block_size=16,
        max_model_len=2048,
        vocab_size=1000,
        max_running=running,
        max_queued_requests=waiting + running,
    )
    scheduler = Scheduler(config, make_policy(policy, chunk_size=8192, cost=OnlineCostModel(COST)))
    for index in range(running + waiting):
        request = Request(f"r{index}", tuple(range(32)), 1000, promise=Promise(60, 0.1))
        scheduler.add(request, 0.0)
    times = []
    now = 0.0
    for iteration in range(ITERATIONS + 20):
        now += 0.02
        started = time.perf_counter()
        plan = scheduler.schedule(now)
        scheduled = time.perf_counter()
        assert plan is not None  # everybody has work
        result = IterationResult(plan.iteration, (7,) * len(scheduler.under_way(plan.iteration).sampling))
        answered = time.perf_counter()
        scheduler.commit(result, now)
        scheduler.take_timings()
        if iteration >= 20:
            times.append(scheduled - started + time.perf_counter() - answered)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {policy: {size: round(measure(policy, size, size), 3) for size in SIZES} for policy in ("chunked", "slo")}
    if arguments.json:
        print(json.dumps({"milliseconds": rows, "targets": TARGETS_MS}, indent=2))
        return
    print(f"{'running + waiting':<20}" + "".join(f"{f'{size} + {size}':>16}" for size in SIZES))
    for policy, row in rows.items():
        print(f"{policy:<20}" + "".join(f"{row[size]:>13.3f} ms" for size in SIZES))
    print(f"{'target':<20}" + "".join(f"{f'{TARGETS_MS[s]} ms' if s in TARGETS_MS else '':>16}" for s in SIZES))


if __name__ == "__main__":
    main()
