"""The policies by name, one file each."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.budget import StaticBudget
from scheduler.policies.alternate import AlternatePolicy
from scheduler.policies.base import Draft, Forward, Policy
from scheduler.policies.chunked import ChunkedPolicy
from scheduler.policies.whole import WholePolicy

__all__ = ["POLICIES", "Draft", "Forward", "Policy", "make_policy"]

POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "whole": lambda chunk_size, max_batched_tokens: WholePolicy(max_batched_tokens),
    "alternate": lambda chunk_size, max_batched_tokens: AlternatePolicy(
        StaticBudget(min(chunk_size, max_batched_tokens))
    ),
    "chunked": lambda chunk_size, max_batched_tokens: ChunkedPolicy(StaticBudget(min(chunk_size, max_batched_tokens))),
}


def make_policy(name: str, *, chunk_size: int = 512, max_batched_tokens: int = 8192) -> Policy:
    """Raises ValueError for an unknown name or an impossible size, in one line that names the choices."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](chunk_size, max_batched_tokens)
