"""What the groups of an engine cost, measured once for each kind of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.profile import Progress
from cluster.rebuild import LastingGroup
from cluster.roles import GroupKind
from cluster.tuning import Tuning, by_role, tune
from scheduler.exchange import Role


async def measure(
    config: EngineConfig,
    info: EngineInfo,
    kinds: Sequence[GroupKind],
    groups: Sequence[LastingGroup],
    progress: Progress,
    trusted: bool,
) -> dict[Role, Tuning | None]:
    """By role. Groups of one tensor-parallel degree are alike, whatever they are for: the first of them is measured."""
    measured: dict[int, Tuning | None] = {}
    found: dict[Role, Tuning | None] = {}
    for kind, group in zip(kinds, groups, strict=True):
        degree = kind.config.tp
        if degree not in measured:
            own = replace(info, tp=degree, num_blocks=group.num_blocks)
            measured[degree] = await tune(_as_measured(kind, kinds), own, group, time.monotonic, progress, trusted)
            await group.give_back()
        found[kind.role] = measured[degree]
    prefill, decode = found.get("prefill"), found.get("decode")
    if prefill is not None and decode is not None:
        found |= by_role(config, prefill, decode)
    return found


def _as_measured(kind: GroupKind, kinds: Sequence[GroupKind]) -> EngineConfig:
    """Where one of the policies needs measured workers, those of all kinds are."""
    by_promises = any(each.config.policy == "slo" for each in kinds)
    return kind.config.model_copy(update={"policy": "slo"}) if by_promises else kind.config
