"""One way to schedule, and the engine's configuration that it is on given resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import EngineConfig

NAMES = ("alternate", "whole", "chunked", "slo", "separated")
CHUNK_SIZES = (64, 128, 256, 512)
SIZED = ("chunked", "separated")
"""Tried at several chunk sizes, and with several splits, respectively."""

Split = tuple[int, int]
"""Groups that prefill and groups that decode."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """`kind` is one of NAMES. `chunk_size` None: the base configuration's, which says nothing to `whole` and `slo`."""

    kind: str
    chunk_size: int | None = None
    split: Split | None = None

    @property
    def name(self) -> str:
        if self.kind == "separated":
            return "separated" if self.split is None else f"separated {self.split[0]}:{self.split[1]}"
        return self.kind if self.chunk_size is None else f"{self.kind} {self.chunk_size}"

    def engine(self, base: EngineConfig) -> EngineConfig:
        """The same resources as `base`, which is colocated. Raises ValueError, in one line, where that cannot be."""
        if self.kind != "separated":
            changed: dict[str, Any] = {"policy": self.kind}
            return _changed(base, changed if self.chunk_size is None else {**changed, "chunk_size": self.chunk_size})
        prefill, decode = self.split or half_and_half(base.groups)
        if prefill + decode != base.groups:
            raise ValueError(f"{prefill} prefill and {decode} decode groups are not the {base.groups} of the others")
        roles = {"mode": "separated", "prefill_groups": prefill, "decode_groups": decode}
        # Prompts are cut on the prefill side too, since a chunk's KV moves while the next one is computed.
        return _changed(base, {"groups": 1, "policy": "chunked", "prefill_policy": "chunked", **roles})


def configurations(
    kinds: Sequence[str] = NAMES,
    chunk_sizes: Sequence[int] = CHUNK_SIZES,
    splits: Sequence[Split] = (),
    alternate_chunk: int | None = None,
) -> list[Configuration]:
    """In the order of `kinds`. Raises ValueError for a kind that there is not, or for none."""
    unknown = [kind for kind in kinds if kind not in NAMES]
    if unknown or not kinds:
        what = f"unknown configuration {unknown[0]!r}" if unknown else "no configuration"
        raise ValueError(f"{what}; choose from {', '.join(NAMES)}")
    found: list[Configuration] = []
    for kind in dict.fromkeys(kinds):
        if kind == "chunked":
            found += [Configuration(kind, size) for size in dict.fromkeys(chunk_sizes)]
        elif kind == "separated":
            found += [Configuration(kind, split=split) for split in dict.fromkeys(splits)] or [Configuration(kind)]
        else:
            found.append(Configuration(kind, alternate_chunk if kind == "alternate" else None))
    return found


def half_and_half(groups: int) -> Split:
    """Raises ValueError for a single group, which cannot be divided."""
    if groups < 2:
        raise ValueError("separated needs at least 2 groups on the same resources; give --groups")
    return groups // 2, groups - groups // 2


def _changed(base: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    """Checked anew, which a copy is not."""
    return EngineConfig(**{**base.model_dump(exclude_defaults=True), **changes})
