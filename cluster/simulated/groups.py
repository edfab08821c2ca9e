"""Which groups a simulation has."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.roles import GroupKind, group_kinds


def kinds_of(config: EngineConfig) -> list[GroupKind]:
    """As `group_kinds`. Raises ValueError for what is not simulated."""
    kinds = group_kinds(config)
    if {kind.config.tp for kind in kinds} != {config.tp}:
        raise ValueError("simulated groups have one tensor-parallel degree; leave out --prefill-tp and --decode-tp")
    return kinds
