"""What scheduling itself costs: one schedule plus commit, with many running and as many waiting sequences.

    python benchmarks/scheduling.py [--json]

Every running sequence decodes and the waiting ones find no slot, so that each iteration has work for all. Median and
minimum of the iterations, in milliseconds, for each policy that fuses; targets for the median: 0.5 ms at 256 + 256,
2 ms at 1,000 + 1,000. The rows `prefilling` have a tenth of the running ones at their prompts, without a target; under
`slo` most of those wait as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.plan import IterationResult
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.slo import Promise

COST = Coefficients(0.002, 0.01, 1e-5, 1e-9, 1e-11, 1e-6, 2.0)
SIZES = (64, 256, 1000)
TARGETS_MS = {256: 0.5, 1000: 2.0}
POLICIES = ("chunked", "slo")
WARM_UP = 20
ITERATIONS = 60
CHUNK = 512
LONG_PROMPT = (WARM_UP + ITERATIONS + 10) * CHUNK


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one schedule plus commit."""

    median: float
    minimum: float


def measure(policy: str, size: int, prefilling: int = 0) -> Cost:
    """With `size` running, of which `prefilling` have prompts that last longer than this does, and `size` waiting."""
    scheduler = loaded(policy, size, prefilling)
    times = []
    now = 0.0
    for _ in range(WARM_UP + ITERATIONS):
        now += 0.02
        started = time.perf_counter()
        plan = scheduler.schedule(now)
        scheduled = time.perf_counter()
        assert plan is not None  # everybody has work
        result = IterationResult(plan.iteration, (7,) * len(scheduler.under_way(plan.iteration).sampling))
        answered = time.perf_counter()
        scheduler.commit(result, now)
        scheduler.take_timings()
        times.append(1e3 * (scheduled - started + time.perf_counter() - answered))
    prompts = [scheduler.sequences[f"p{index}"] for index in range(prefilling)]
    assert all(sequence.first_token_at is None for sequence in prompts)
    return Cost(round(statistics.median(times[WARM_UP:]), 3), round(min(times[WARM_UP:]), 3))


def loaded(policy: str, size: int, prefilling: int) -> Scheduler:
    """Prompts have CHUNK tokens of an iteration, so that not even one that gets them all is done before the end."""
    config = SchedulerConfig(
        num_blocks=(size + 1) * 40 + prefilling * LONG_PROMPT // 16,
        block_size=16,
        max_model_len=2 * LONG_PROMPT,
        vocab_size=1000,
        max_running=size,
        max_queued_requests=2 * size,
        max_queued_tokens=2**40,
    )
    most = CHUNK if prefilling else 8192
    cost = OnlineCostModel(COST)
    scheduler = Scheduler(config, make_policy(policy, chunk_size=most, max_batched_tokens=most, cost=cost))
    for index in range(size - prefilling):
        scheduler.add(Request(f"s{index}", tuple(range(32)), 1000, promise=Promise(60, 0.1)), 0.0)
    while any(not sequence.tokens[32:] for sequence in scheduler.running) or scheduler.waiting:
        plan = scheduler.schedule(0.0)
        assert plan is not None  # there are prompts
        scheduler.commit(IterationResult(plan.iteration, (7,) * len(scheduler.under_way(plan.iteration).sampling)), 0.0)
        scheduler.take_timings()
    for index in range(prefilling):  # no two alike: they would wait for each other
        prompt = tuple((token + index) % 1000 for token in range(LONG_PROMPT))
        scheduler.add(Request(f"p{index}", prompt, 1000, promise=Promise(60 + index, 0.1)), 0.0)
    for index in range(size):
        scheduler.add(Request(f"w{index}", tuple(range(32)), 1000, promise=Promise(60, 0.1)), 0.0)
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measure("chunked", 256)  # until the processor is at its full frequency
    rows = {policy: {size: measure(policy, size) for size in SIZES} for policy in POLICIES}
    for policy in POLICIES:
        rows[f"{policy}, prefilling"] = {size: measure(policy, size, size // 10) for size in SIZES}
    if arguments.json:
        figures = {name: {size: asdict(cost) for size, cost in row.items()} for name, row in rows.items()}
        print(json.dumps({"milliseconds": figures, "targets": TARGETS_MS}, indent=2))
        return
    print(f"{'median / minimum':<20}" + "".join(f"{f'{size} + {size}':>20}" for size in SIZES))
    for name, row in rows.items():
        cells = (f"{row[size].median:.3f} / {row[size].minimum:.3f} ms" for size in SIZES)
        print(f"{name:<20}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"{'target':<20}" + "".join(f"{f'{TARGETS_MS[s]} ms' if s in TARGETS_MS else '':>20}" for s in SIZES))


if __name__ == "__main__":
    main()
