"""Where the ranks of a worker group run: one bundle a rank, all on one node where they fit."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group

from cluster.ray_facts import (
    free_resources,
    new_placement_group,
    node_resources,
    placement_group_names,
    total_resources,
)

CPUS_OF_A_RANK = 0.5
"""Reserved, not used: a rank takes the threads it was told to. Small, so that a laptop can place several ranks and
Serve's own actors beside them."""
TIMEOUT_S = 60.0
_PREFIX = "stallfree-group"


async def place(ranks: int, device: str, name: str, timeout_s: float = TIMEOUT_S) -> PlacementGroup:
    """A placement group of `ranks` bundles; `name` is from `group_name`. One of that name is removed, with all that
    runs in it: an earlier life of its owner left it.

    Raises ValueError, in one line, where the cluster has no room for it.
    """
    bundle: dict[str, float] = {"GPU": 1.0} if device.startswith("cuda") else {"CPU": CPUS_OF_A_RANK}
    _check_total(bundle, ranks)
    _remove(name)
    strategy = "STRICT_PACK" if _fits_one_node(bundle, ranks) else "PACK"
    group = new_placement_group([bundle] * ranks, strategy, name)
    try:
        await asyncio.to_thread(ray.get, group.ready(), timeout=timeout_s)
    except GetTimeoutError:
        remove_placement_group(group)
        raise ValueError(_missing(bundle, ranks, free_resources(), "free")) from None
    return group


def group_name(scheduler: str, namespace: str, index: int) -> str:
    """Of the worker group `index` of a scheduler actor: whose it is can be told after that actor is dead."""
    return "/".join((_PREFIX, namespace, scheduler, str(index)))


def remove_orphans() -> None:
    """Give back what schedulers that are dead had placed. Ray keeps an actor's groups until its whole job ends."""
    for name in placement_group_names():
        prefix, *owner = name.split("/")
        if prefix == _PREFIX and len(owner) == 3 and not _lives(scheduler=owner[1], namespace=owner[0]):
            _remove(name)


def _remove(name: str) -> None:
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def _lives(scheduler: str, namespace: str) -> bool:
    try:
        ray.get_actor(scheduler, namespace=namespace)
    except ValueError:
        return False
    return True


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
