"""Where the ranks of a worker group run: one bundle a rank, all on one node where they fit."""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.ray_facts import free_resources, new_placement_group, node_resources, total_resources

CPUS_OF_A_RANK = 0.5
"""Reserved, not used: a rank takes the threads it was told to. Small, so that a laptop can place several ranks and
Serve's own actors beside them."""
TIMEOUT_S = 60.0


async def place(ranks: int, device: str, timeout_s: float = TIMEOUT_S) -> PlacementGroup:
    """A placement group of `ranks` bundles. Raises ValueError, in one line, where the cluster has no room for it."""
    bundle: dict[str, float] = {"GPU": 1.0} if device.startswith("cuda") else {"CPU": CPUS_OF_A_RANK}
    _check_total(bundle, ranks)
    strategy = "STRICT_PACK" if _fits_one_node(bundle, ranks) else "PACK"
    group = new_placement_group([bundle] * ranks, strategy)
    try:
        await asyncio.to_thread(ray.get, group.ready(), timeout=timeout_s)
    except GetTimeoutError:
        remove_placement_group(group)
        raise ValueError(_missing(bundle, ranks, free_resources(), "free")) from None
    return group


def _check_total(bundle: dict[str, float], ranks: int) -> None:
    """What the cluster does not have at all, waiting does not bring."""
    total = total_resources()
    if any(total.get(name, 0) < amount * ranks for name, amount in bundle.items()):
        raise ValueError(_missing(bundle, ranks, total, "in the cluster"))


def _missing(bundle: dict[str, float], ranks: int, there: dict[str, float], where: str) -> str:
    (name, amount), *_ = bundle.items()
    return (
        f"{ranks} ranks need {amount * ranks:g} {name}, but {there.get(name, 0):g} are {where}; "
        f"lower --tp or --groups, or add nodes"
    )


def _fits_one_node(bundle: dict[str, float], ranks: int) -> bool:
    return any(all(node.get(name, 0) >= amount * ranks for name, amount in bundle.items()) for node in node_resources())
