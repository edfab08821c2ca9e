"""From measured workers to promises and budgets: the cost model, the default promises, the `slo` policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from cluster.config import EngineConfig, SloPromise
from cluster.engine import EngineInfo
from cluster.executor import Executor
from cluster.loop import IterationRecord
from cluster.outlook import TYPICAL_CONTEXT, TYPICAL_STREAMS, outlook
from cluster.profile import Progress, fitted
from scheduler.costmodel import OnlineCostModel
from scheduler.exchange import Role
from scheduler.gate import Gate
from scheduler.policies import Policy, make_policy
from scheduler.policies.slo import SloSettings
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler
from scheduler.slo import LONGEST_PROMISE_S, Promise, PromiseBook
from scheduler.solver import Load, Solver

SHORT_PROMPT = 64
TPOT_FACTOR = 2.5
"""The default TPOT over the plain decode step of the typical batch: what is left is the budget for prompts."""
TTFT_FACTOR = 2.0
"""The default TTFT over the time that a prompt needs at that budget: room for one prompt before it."""
TBT_FACTOR = 2.0
"""The default bound on a single gap over the default TPOT."""
ITERATIONS_WAITED = 8
"""Of the longest ones, that a short prompt's TTFT is worth."""
TOKENS_WAITED = 2
"""Times the pace of streams, that an iteration may take where none runs: who comes waits for half of it on average."""
CUDA_TILE = 128
DELIVERY_S = 0.0015
"""What two tokens may differ by in their ways from the workers to the client, by whose clock promises are kept."""
QUANTILE = SloSettings().quantile


@dataclass
class Tuning:
    """What a group of workers is known to cost, and what follows from it."""

    cost: OnlineCostModel
    promises: PromiseBook
    decode: OnlineCostModel | None = None
    """Of the groups that generate, where this is of groups that only compute prompts."""

    def predict(self, forwards: tuple[Features, ...]) -> float:
        """Seconds of an iteration, as far as is known now."""
        return sum(self.cost.predict(forward) for forward in forwards)

    def observe(self, record: IterationRecord) -> None:
        """Learn from an iteration. One of two forwards (`alternate`) says nothing about a fused one."""
        features = record.under_way.features
        if len(features) == 1:
            starved = record.under_way.decision.bound != "none" and not features[0].prefill_tokens
            self.cost.observe(features[0], record.actual_s, record.ended, starved)

    def relax(self, now: float) -> None:
        """Each by itself: another group of them may have been busy all the time."""
        self.cost.relax(now)
        if self.decode is not None:
            self.decode.relax(now)

    def allowing(self) -> Callable[[float], float]:
        """Seconds that an iteration is within, as far as is known now, for those that are predicted."""
        return self.cost.allowance(QUANTILE).of


async def tune(
    config: EngineConfig,
    info: EngineInfo,
    executor: Executor,
    clock: Callable[[], float],
    progress: Progress | None = None,
    trusted: bool = False,
) -> Tuning | None:
    """Measure the workers (or read what is known of them, untried where it is `trusted`), and derive the promises that
    were not given. None where they are not to be measured, which `slo` does not allow."""
    if config.profile_seconds == 0 and config.policy != "slo":
        return None
    cost = OnlineCostModel(await fitted(executor, info, config, clock, progress, trusted))
    return Tuning(cost, promise_book(config, cost))


def by_role(config: EngineConfig, prefill: Tuning, decode: Tuning) -> dict[Role, Tuning]:
    """Of measured groups that prefill and that decode: what the prompts of the ones and the streams of the others allow
    to promise is promised by both."""
    promises = promise_book(config, decode.cost, prefill.cost)
    return {"prefill": Tuning(prefill.cost, promises, decode.cost), "decode": Tuning(decode.cost, promises)}


def promise_book(config: EngineConfig, cost: OnlineCostModel, prefill: OnlineCostModel | None = None) -> PromiseBook:
    """The operator's numbers where there are any; the rest from what was measured at the start, so that a machine that
    slows down later does not promise less by itself. `prefill` is what groups that compute prompts alone cost."""
    solver = Solver((prefill or cost).base, cap=config.max_batched_tokens)
    streams = 0 if prefill is not None else TYPICAL_STREAMS
    typical = Features(decodes=TYPICAL_STREAMS, decode_context=TYPICAL_STREAMS * TYPICAL_CONTEXT)
    tpot = config.tpot_ms / 1e3 if config.tpot_ms is not None else TPOT_FACTOR * cost.base.predict(typical)
    tbt = config.tbt_ms / 1e3 if config.tbt_ms is not None else None
    if config.tpot_ms is None and config.tbt_ms is None:
        tbt = TBT_FACTOR * tpot  # where nobody said what they want, no stream is left to stall on its savings

    given = None if config.ttft_ms is None else Promise(config.ttft_ms / 1e3, tpot, tbt)

    @lru_cache(maxsize=4096)  # asked for each request, and a long prompt has many chunks
    def default(prompt_tokens: int) -> Promise:
        if given is not None:
            return given
        load = Load(max(1, prompt_tokens), streams, TYPICAL_CONTEXT)
        chunk = solver.largest_chunk(load, tpot) if streams else min(load.prompt, config.max_batched_tokens)
        needed = solver.prefill(load, max(1, chunk))
        return Promise(min(max(TTFT_FACTOR * needed, 2 * tpot), LONGEST_PROMISE_S), tpot, tbt)

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
        longest_s=math.inf if tuning is None else longest_iteration(tuning),
        delivery_s=DELIVERY_S,
        prefill_order=config.prefill_order,
    )


def longest_iteration(tuning: Tuning) -> float:
    """Seconds that leave who comes the moment such an iteration starts most of the time until its first token is due,
    at least for a short prompt. Shorter than what a stream waits for two tokens it need not be: short chunks read the
    weights, and what was computed of the prompt, more often."""
    own = tuning.cost.predict(Features().with_chunk(0, SHORT_PROMPT))
    default = tuning.promises.promise(SHORT_PROMPT)
    little = max(default.ttft_s / ITERATIONS_WAITED, TOKENS_WAITED * default.tpot_s)
    return min(little, max(default.ttft_s - own, default.ttft_s / 2))


def gate_for(config: EngineConfig, policy: str, tuning: Tuning | None) -> Gate | None:
    """Promises are judged at admission where budgets follow from them."""
    return None if policy != "slo" or tuning is None else forecaster_for(config, tuning, longest_iteration(tuning))


def forecaster_for(config: EngineConfig, tuning: Tuning, longest_s: float = math.inf) -> Gate:
    cap = config.max_batched_tokens
    streams = None if tuning.decode is None else Solver(tuning.decode, cap=cap)
    return Gate(Solver(tuning.cost, cap=cap), config.on_infeasible, tuning.allowing, streams, longest_s, tuning.relax)


def apply_policy(
    scheduler: Scheduler, config: EngineConfig, name: str, chunk_size: int, info: EngineInfo, tuning: Tuning | None
) -> None:
    """Give a scheduler its policy, and the gate that goes with it. Raises ValueError."""
    if name == "slo" and tuning is None:
        raise ValueError("the workers were not measured at the start (profile_seconds 0), so that slo cannot be used")
    scheduler.policy = policy_for(config, name, chunk_size, info, tuning)
    scheduler.intake.gate = gate_for(config, name, tuning)


def with_outlook(config: EngineConfig, info: EngineInfo, tuning: Tuning | None) -> EngineInfo:
    """The engine's facts, with what it can promise."""
    if tuning is None:
        return info
    solver = Solver(tuning.cost.base, cap=config.max_batched_tokens)
    streams = None if tuning.decode is None else Solver(tuning.decode.base, cap=config.max_batched_tokens)
    found = outlook(solver, tuning.promises, info.max_model_len, config.max_running, streams)
    return replace(info, outlook=found)
