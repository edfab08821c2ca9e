"""Which worker groups an engine has, and what each of them is for."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import EngineConfig
from scheduler.exchange import Role


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A group's role, and the configuration with that role's tensor-parallel degree and policy."""

    role: Role
    config: EngineConfig


def group_kinds(config: EngineConfig) -> list[GroupKind]:
    """Of every group, in the order of their numbers: those that prefill before those that decode."""
    if not config.separated:
        return [GroupKind("both", config)] * config.groups
    prefill = {
        "tp": config.prefill_tp or config.tp,
        "policy": config.prefill_policy or config.policy,
        "preempt": "recompute",  # what has been computed of a prompt is on its way to another group
        "swap_memory": None,
    }
    decode = {"tp": config.decode_tp or config.tp}
    return [
        *[GroupKind("prefill", config.model_copy(update=prefill))] * config.prefill_groups,
        *[GroupKind("decode", config.model_copy(update=decode))] * config.decode_groups,
    ]
