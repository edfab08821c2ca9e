"""The policies by name, one file each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.budget import StaticBudget
from scheduler.costmodel import OnlineCostModel
from scheduler.policies.alternate import AlternatePolicy
from scheduler.policies.base import Draft, Mix, Policy
from scheduler.policies.chunked import ChunkedPolicy
from scheduler.policies.slo import PrefillOrder, SloBudget, SloPolicy, SloSettings
from scheduler.policies.whole import WholePolicy

__all__ = ["POLICIES", "Draft", "Mix", "Policy", "PolicyOptions", "PrefillOrder", "make_policy"]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What policies are made from. `cost` is needed by `slo` alone, which also reads `tile`, the granularity of the
    matrix kernels, `longest_s`, seconds that no iteration is to exceed for prompts, `delivery_s` and `prefill_order`
    (SloSettings)."""

    chunk_size: int = 512
    max_batched_tokens: int = 8192
    cost: OnlineCostModel | None = None
    tile: int = 1
    longest_s: float = math.inf
    delivery_s: float = 0.0
    prefill_order: PrefillOrder = "deadline"

    @property
    def static_budget(self) -> StaticBudget:
        return StaticBudget(min(self.chunk_size, self.max_batched_tokens))


def _slo(options: PolicyOptions) -> Policy:
    if options.cost is None:
        raise ValueError("the slo policy needs a cost model")
    settings = SloSettings(
        max_batched_tokens=options.max_batched_tokens,
        longest_s=options.longest_s,
        delivery_s=options.delivery_s,
        tile=options.tile,
        prefill_order=options.prefill_order,
    )
    return SloPolicy(SloBudget(options.cost, settings))


POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "whole": lambda options: WholePolicy(options.max_batched_tokens),
    "alternate": lambda options: AlternatePolicy(options.static_budget),
    "chunked": lambda options: ChunkedPolicy(options.static_budget),
    "slo": _slo,
}


def make_policy(
    name: str,
    *,
    chunk_size: int = 512,
    max_batched_tokens: int = 8192,
    cost: OnlineCostModel | None = None,
    tile: int = 1,
    longest_s: float = math.inf,
    delivery_s: float = 0.0,
    prefill_order: PrefillOrder = "deadline",
) -> Policy:
    """Raises ValueError for an unknown name or an impossible size, in one line that names the choices."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    options = PolicyOptions(chunk_size, max_batched_tokens, cost, tile, longest_s, delivery_s, prefill_order)
    return POLICIES[name](options)
