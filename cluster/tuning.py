"""From measured workers to promises and budgets: the cost model, the default promises, the `slo` policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import EngineConfig, SloPromise
from cluster.engine import EngineInfo
from cluster.executor import Executor
from cluster.loop import IterationRecord
from cluster.profile import Progress, fitted
from scheduler.costmodel import OnlineCostModel
from scheduler.policies import Policy, make_policy
from scheduler.roofline import Features
from scheduler.slo import Promise, PromiseBook
from scheduler.solver import Load, Solver

TYPICAL_DECODES, TYPICAL_CONTEXT = 8, 512
TPOT_FACTOR = 2.5
"""The default TPOT over the plain decode step of the typical batch: what is left is the budget for prompts."""
TTFT_FACTOR = 2.0
"""The default TTFT over the time that a prompt needs at that budget: room for one prompt before it."""
TBT_FACTOR = 2.0
"""The default bound on a single gap over the default TPOT."""
CUDA_TILE = 128


@dataclass
class Tuning:
    """What a group of workers is known to cost, and what follows from it."""

    cost: OnlineCostModel
    promises: PromiseBook

    def observe(self, record: IterationRecord) -> None:
        """Learn from an iteration. One of two forwards (`alternate`) says nothing about a fused one."""
        if len(record.features) == 1:
            self.cost.observe(record.features[0], record.ended - record.started)


async def tune(
    config: EngineConfig,
    info: EngineInfo,
    executor: Executor,
    clock: Callable[[], float],
    progress: Progress | None = None,
) -> Tuning:
    """Measure the workers (or read what is known of them), and derive the promises that were not given."""
    cost = OnlineCostModel(await fitted(executor, info, config.max_running, clock, progress))
    return Tuning(cost, promise_book(config, cost))


def promise_book(config: EngineConfig, cost: OnlineCostModel) -> PromiseBook:
    """The operator's numbers where there are any; the rest from the cost model as it is now."""
    solver = Solver(cost, cap=config.max_batched_tokens)
    typical = Features(decodes=TYPICAL_DECODES, decode_context=TYPICAL_DECODES * TYPICAL_CONTEXT)
    tpot = config.tpot_ms / 1e3 if config.tpot_ms is not None else TPOT_FACTOR * cost.predict(typical)
    tbt = config.tbt_ms / 1e3 if config.tbt_ms is not None else None
    if config.tpot_ms is None and config.tbt_ms is None:
        tbt = TBT_FACTOR * tpot  # where nobody said what they want, no stream is left to stall on its savings

    def default(prompt_tokens: int) -> Promise:
        if config.ttft_ms is not None:
            return Promise(config.ttft_ms / 1e3, tpot, tbt)
        load = Load(max(1, prompt_tokens), TYPICAL_DECODES, TYPICAL_CONTEXT)
        needed = solver.prefill(load, max(1, solver.largest_chunk(load, tpot)))
        return Promise(max(TTFT_FACTOR * needed, 2 * tpot), tpot, tbt)

    classes = {
        name: meant.promise() if isinstance(meant, SloPromise) else meant for name, meant in config.slo_classes.items()
    }
    return PromiseBook(default, classes)


def policy_for(config: EngineConfig, name: str, chunk_size: int, info: EngineInfo, tuning: Tuning | None) -> Policy:
    """Raises ValueError for a policy that does not exist, or one that needs measured workers where they are not."""
    return make_policy(
        name,
        chunk_size=chunk_size,
        max_batched_tokens=config.max_batched_tokens,
        cost=None if tuning is None else tuning.cost,
        tile=CUDA_TILE if info.device.startswith("cuda") else 1,
    )


def describe_promises(promises: PromiseBook) -> str:
    """For a person: the default for a short and a long prompt."""
    short, long = promises.promise(128), promises.promise(2048)
    gap = "" if short.tbt_s is None else f" (no gap above {short.tbt_s * 1e3:.0f} ms)"
    return (
        f"TPOT {short.tpot_s * 1e3:.0f} ms{gap}, TTFT {short.ttft_s * 1e3:.0f} ms for 128 prompt tokens and "
        f"{long.ttft_s * 1e3:.0f} ms for 2,048"
    )
