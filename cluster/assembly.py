"""From one configuration to its parts: what a worker is told, what the engine says of itself, a group's scheduler."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.roles import group_kinds
from cluster.tuning import Tuning, forecaster_for, gate_for, policy_for
from scheduler.census import Census
from scheduler.directory import Directory
from scheduler.exchange import Role
from scheduler.scheduler import Scheduler, SchedulerConfig
from workers.config import WorkerConfig, WorkerDescription


def worker_config(config: EngineConfig, model_dir: str) -> WorkerConfig:
    """Rank 0 of one; other ranks differ by rank, world size and rendezvous."""
    return WorkerConfig(
        model_dir=model_dir,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        attention=config.attention,
        block_size=config.block_size,
        threads=config.threads,
        max_model_len=config.max_model_len,
        max_running=config.max_running,
        max_batched_tokens=config.max_batched_tokens,
    )


def engine_info(
    config: EngineConfig,
    model_dir: str,
    ranks: list[WorkerDescription],
    pools: list[int],
    transport: str,
    swap_blocks: int = 0,
) -> EngineInfo:
    """What a running engine says of itself, from what its ranks say. `ranks` are one group's, `pools` the KV blocks of
    every group, `swap_blocks` those of host memory of each group that swaps."""
    first, kinds = ranks[0], group_kinds(config)
    return EngineInfo(
        model=config.model,
        model_dir=model_dir,
        served_model_name=config.served_model_name or config.model,
        max_model_len=first.max_model_len,
        vocab_size=first.vocab_size,
        block_size=first.block_size,
        num_blocks=min(pools),
        tp=config.tp,
        groups=config.group_count,
        mode=config.mode,
        prefill_groups=len([kind for kind in kinds if kind.role == "prefill"]),
        decode_groups=len([kind for kind in kinds if kind.role == "decode"]),
        prefill_tp=kinds[0].config.tp,
        decode_tp=kinds[-1].config.tp,
        prefill_blocks=min(pool for kind, pool in zip(kinds, pools, strict=True) if kind.role == kinds[0].role),
        decode_blocks=min(pool for kind, pool in zip(kinds, pools, strict=True) if kind.role == kinds[-1].role),
        policy=config.policy,
        chunk_size=config.chunk_size,
        device=first.device,
        dtype=first.dtype,
        kv_dtype=first.kv_dtype,
        swap_blocks=swap_blocks,
        iteration_bytes=sum(rank.iteration_bytes for rank in ranks),
        attention=first.attention,
        transport=transport,
        most_requests=config.group_count * (config.max_running + config.max_queued_requests),
    )


@dataclass(frozen=True, slots=True)
class Common:
    """What the schedulers of one engine have in common, so that a sequence may go from one to another."""

    prefix_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    orders: Iterator[int] = field(default_factory=itertools.count)
    directory: Directory = field(default_factory=Directory)
    census: Census = field(default_factory=Census)


def make_scheduler(
    config: EngineConfig,
    info: EngineInfo,
    tuning: Tuning | None = None,
    *,
    role: Role = "both",
    num_blocks: int | None = None,
    common: Common | None = None,
) -> Scheduler:
    """A group's scheduler, sized by the engine's facts (or `num_blocks` of its own), with the promises that its
    measured workers allow."""
    sizes = SchedulerConfig(
        num_blocks=num_blocks or info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_running=config.max_running,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        prefix_caching=config.prefix_caching,
        swap_blocks=info.swap_blocks if config.preempt == "swap" else 0,
    )
    policy = policy_for(config, config.policy, config.chunk_size, info, tuning)
    common = common or Common()
    scheduler = Scheduler(
        sizes,
        policy,
        common.prefix_key,
        role=role,
        orders=common.orders,
        directory=common.directory,
        census=common.census,
    )
    if tuning is not None:
        scheduler.intake.promises = tuning.promises
        scheduler.intake.gate = gate_for(config, config.policy, tuning)
        scheduler.intake.forecaster = scheduler.intake.gate or forecaster_for(config, tuning)
    return scheduler
