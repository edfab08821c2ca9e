"""A worker group on Ray: its placement, its ranks, and the way to them. To the iteration loop it is an executor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.assembly import worker_config
from cluster.config import EngineConfig
from cluster.placement import place
from cluster.rank_process import RankProcess
from cluster.recovery import WorkersLost, hear, in_words
from cluster.sizing import kv_blocks, swap_blocks
from cluster.transport import Transport, make_transport
from cluster.worker_actor import CONTROL, KV, KV_REPORTS, PLANS, RankActor
from scheduler.codec import decode_result, encode_plan
from scheduler.plan import IterationPlan, IterationResult
from workers.config import WorkerDescription

PING_S = 2.0
DEATH_NOTICE_S = 2.0
"""Ray tells of a death within milliseconds, but what its peers say of it may come first."""


class WorkerGroup:
    """Built by `start`; `close` gives everything back, and so does `destroy`, whatever state the ranks are in. Ranks
    die with the process that started them."""

    def __init__(self, placement: PlacementGroup, ranks: list[ActorHandle[Any]]) -> None:
        self._placement = placement
        self._ranks = ranks
        self._transport: Transport | None = None
        self._here = False
        self._deaths: list[asyncio.Future[None]] = []
        self._processes: list[RankProcess] = []
        self.descriptions: list[WorkerDescription] = []
        self.num_blocks = 0
        self.swap_blocks = 0

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model_dir: str,
        device: str,
        name: str,
        say: Callable[[str], None],
        swap: int | None = None,
    ) -> WorkerGroup:
        """Place, load and size a group, with `swap` blocks of host memory or as many as follow.

        Raises ValueError, in one line, where that cannot be; nothing stays behind."""
        say(f"placing {config.tp} {'rank' if config.tp == 1 else 'ranks'}")
        placement = await place(config.tp, device, name)
        group = cls(placement, [])
        try:
            group._ranks = [_rank_actor(placement, rank, device, _threads(config)) for rank in range(config.tp)]
            say("loading weights")
            await group._load(config, model_dir)
            await group._allocate(config, swap)
            group._transport = await make_transport(config.transport, group._ranks, device, group._here)
            group._deaths = [asyncio.ensure_future(_watch(rank)) for rank in group._ranks]
        except BaseException:
            await group.destroy()
            raise
        return group

    @property
    def transport(self) -> str:
        return "none" if self._transport is None else self._transport.name

    async def execute(self, plan: IterationPlan) -> IterationResult:
        """Raises WorkersLost where a rank died or failed."""
        if self._transport is None:
            raise WorkersLost("the group is closed")
        answer = asyncio.ensure_future(self._transport.send(encode_plan(plan)))
        answer.add_done_callback(hear)
        # A rank that waits for a dead one in a collective never answers, so the deaths are listened for as well.
        awaited: list[asyncio.Future[Any]] = [answer, *self._deaths]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise WorkersLost(self.obituary())
        try:
            return decode_result(await answer)
        except Exception as error:
            raise WorkersLost(await self._cause_of(error)) from error

    def on_death(self, call: Callable[[], None]) -> None:
        """`call` is called when a rank dies."""
        for death in self._deaths:
            death.add_done_callback(lambda _: call())

    def obituary(self) -> str:
        """Which ranks are dead, in one line; empty where none is known to be."""
        dead = [self._called(rank) for rank, death in enumerate(self._deaths) if death.done()]
        return f"{' and '.join(dead)} died" if dead else ""

    async def silent(self) -> str:
        """Which ranks do not answer a ping, in one line; empty where all do."""
        pings = [asyncio.ensure_future(_ping(rank)) for rank in self._ranks]
        await asyncio.wait(pings, timeout=PING_S)
        mute = [self._called(rank) for rank, ping in enumerate(pings) if not ping.done()]
        for ping in pings:
            ping.cancel()
        return " and ".join(mute)

    async def _cause_of(self, error: Exception) -> str:
        """A rank fails when its peer dies, and may be heard first: the death is the cause."""
        await asyncio.wait(self._deaths, timeout=DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        return self.obituary() or f"a rank failed: {in_words(error)}"

    def _called(self, rank: int) -> str:
        return f"rank {rank} (pid {self._processes[rank].pid})"

    @property
    def ranks(self) -> list[ActorHandle[Any]]:
        return self._ranks

    async def give_back(self) -> None:
        """Have every rank return what iterations took, and it does not need by itself. One that cannot need not."""
        await asyncio.gather(*(rank.give_back.remote() for rank in self._ranks), return_exceptions=True)

    async def pids(self) -> list[int]:
        return list(await asyncio.gather(*(rank.ping.remote() for rank in self._ranks)))

    async def close(self) -> None:
        """In order, where the ranks answer."""
        await self._close_transport()
        self._remove()

    async def destroy(self) -> None:
        """By force. Returns when the ranks' processes are gone, as far as they can be reached."""
        for death in self._deaths:
            death.cancel()
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._remove()
        await self._close_transport()

    async def _close_transport(self) -> None:
        for death in self._deaths:
            death.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(Exception):  # a rank that died cannot be taken down in order
                await asyncio.wait_for(transport.close(), 5)

    def _remove(self) -> None:
        for rank in self._ranks:
            with suppress(Exception):
                ray.kill(rank)
        with suppress(Exception):
            remove_placement_group(self._placement)

    async def _load(self, config: EngineConfig, model_dir: str) -> None:
        self._processes = await _all([rank.process.remote() for rank in self._ranks])
        places = await _all([rank.where.remote() for rank in self._ranks])
        _, address, port = places[0]
        nodes = {node for node, _, _ in places}
        one_host = len(nodes) == 1
        self._here = nodes == {ray.get_runtime_context().get_node_id()}
        rendezvous = f"tcp://{'127.0.0.1' if one_host else address}:{port}"
        alone = one_host and config.group_count == 1
        base = worker_config(config, model_dir)
        base = replace(base, world_size=config.tp, rendezvous=rendezvous, alone_on_host=alone)
        loads = [rank.load.remote(replace(base, rank=i), one_host) for i, rank in enumerate(self._ranks)]
        self.descriptions = await _all(loads)

    async def _allocate(self, config: EngineConfig, swap: int | None) -> None:
        self.num_blocks = kv_blocks(config, self.descriptions)
        self.swap_blocks = swap_blocks(config, self.descriptions, self.num_blocks) if swap is None else swap
        await _all([rank.allocate.remote(self.num_blocks, self.swap_blocks) for rank in self._ranks])


async def _ping(rank: ActorHandle[Any]) -> None:
    """Returns when the rank answers, or is known to be dead."""
    with suppress(RayError):
        await rank.ping.remote()


async def _watch(rank: ActorHandle[Any]) -> None:
    """Returns once the rank's process is dead."""
    with suppress(RayError):
        await rank.watch.remote()


async def _all(calls: list[Any]) -> list[Any]:
    """Every rank's answer. A ValueError of a rank is raised as such: it is meant for the one who started the group."""
    try:
        return list(await asyncio.gather(*calls))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from None
        raise


def _threads(config: EngineConfig) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // config.tp)


def _environment(threads: int) -> dict[str, str]:
    """Of a rank's process: how OpenMP's threads wait is this process's own setting (see `workers`), on every node."""
    waiting = {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), **waiting}


def _rank_actor(placement: PlacementGroup, rank: int, device: str, threads: int) -> ActorHandle[Any]:
    resources: dict[str, Any] = {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 0}
    remote: Any = ray.remote
    actor: Any = (
        remote(concurrency_groups={CONTROL: 8, KV: 1, KV_REPORTS: 1, PLANS: 1})(RankActor)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
            runtime_env={"env_vars": _environment(threads)},
            max_restarts=0,
            **resources,
        )
        .remote(rank)
    )
    return cast(ActorHandle[Any], actor)
