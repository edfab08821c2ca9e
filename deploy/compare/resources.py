"""What a configuration had to work with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from cluster.config import EngineConfig
from cluster.engine import EngineInfo


@dataclass(frozen=True, slots=True)
class Groups:
    """`count` groups of one role, of `tp` ranks each."""

    role: str
    count: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.count * self.tp


@dataclass(frozen=True, slots=True)
class Resources:
    """`threads` of a rank (None: not a CPU's); `kv_tokens` of one group's pool."""

    groups: tuple[Groups, ...]
    threads: int | None
    kv_tokens: int
    device: str

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> Resources:
        return cls(
            groups=_groups(config),
            threads=threads_of(config) if info.device.startswith("cpu") else None,
            kv_tokens=info.num_blocks * info.block_size,
            device=info.device,
        )

    @property
    def ranks(self) -> int:
        return sum(groups.ranks for groups in self.groups)

    @property
    def total_kv_tokens(self) -> int:
        return self.kv_tokens * sum(groups.count for groups in self.groups)

    @property
    def comparable(self) -> tuple[int, int, int]:
        """What has to be equal: ranks, threads in all, KV in all."""
        return self.ranks, (self.threads or 0) * self.ranks, self.total_kv_tokens

    def describe(self) -> str:
        roles = " + ".join(f"{groups.count} {groups.role} x tp {groups.tp}" for groups in self.groups)
        threads = "" if self.threads is None else f" of {self.threads} thread{'s' if self.threads > 1 else ''}"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{roles}: {ranks}{threads} on {self.device}, KV for {self.total_kv_tokens:,} tokens in all"

    def as_json(self) -> dict[str, Any]:
        return {
            "groups": [{"role": groups.role, "count": groups.count, "tp": groups.tp} for groups in self.groups],
            "ranks": self.ranks,
            "threads_per_rank": self.threads,
            "kv_tokens": self.total_kv_tokens,
            "device": self.device,
        }


def threads_of(config: EngineConfig) -> int:
    """Of each rank on this machine, where all of them run on it: a thread for each of its CPUs and no more."""
    ranks = sum(groups.ranks for groups in _groups(config))
    return config.threads or max(1, (os.cpu_count() or 1) // ranks)


def _groups(config: EngineConfig) -> tuple[Groups, ...]:
    if not config.separated:
        return (Groups("colocated", config.groups, config.tp),)
    return (
        Groups("prefill", config.prefill_groups, config.prefill_tp or config.tp),
        Groups("decode", config.decode_groups, config.decode_tp or config.tp),
    )
