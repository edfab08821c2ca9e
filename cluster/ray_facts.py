"""Ray's untyped questions about the cluster, with types."""

from __future__ import annotations

from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

_untyped: Any = ray


def total_resources() -> dict[str, float]:
    return cast(dict[str, float], _untyped.cluster_resources())


def free_resources() -> dict[str, float]:
    return cast(dict[str, float], _untyped.available_resources())


def node_resources() -> list[dict[str, float]]:
    """Of every node that is alive."""
    return [node["Resources"] for node in _untyped.nodes() if node["Alive"]]


def node_managers(node: str) -> list[tuple[str, int]]:
    """Where the raylet of a node listens; nothing where Ray knows it to be dead."""
    found = (one for one in _untyped.nodes() if one["NodeID"] == node and one["Alive"])
    return [(one["NodeManagerAddress"], one["NodeManagerPort"]) for one in found]


def node_address() -> str:
    return cast(str, _untyped.util.get_node_ip_address())


def new_placement_group(bundles: list[dict[str, float]], strategy: str, name: str) -> PlacementGroup:
    make: Any = placement_group
    return cast(PlacementGroup, make(bundles, strategy=strategy, name=name))


def placement_group_names() -> list[str]:
    """Of every group that has not been removed."""
    table: Any = placement_group_table
    return [group["name"] for group in table().values() if group["state"] != "REMOVED"]
