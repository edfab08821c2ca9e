"""Which groups a simulation has: their roles, and the configuration of each."""

from __future__ import annotations

from cluster.config import EngineConfig
from scheduler.exchange import Role


def roles_of(config: EngineConfig) -> list[Role]:
    """Of each group, in their order. Raises ValueError for what is not simulated."""
    if not config.separated:
        both: list[Role] = ["both"] * config.groups
        return both
    if {config.prefill_tp or config.tp, config.decode_tp or config.tp} != {config.tp}:
        raise ValueError("simulated groups have one tensor-parallel degree; leave out --prefill-tp and --decode-tp")
    prefill: list[Role] = ["prefill"] * config.prefill_groups
    decode: list[Role] = ["decode"] * config.decode_groups
    return prefill + decode


def config_of(config: EngineConfig, role: Role) -> EngineConfig:
    """With the policy that groups of a role have."""
    own = config.prefill_policy if role == "prefill" else None
    return config if own is None else config.model_copy(update={"policy": own})
