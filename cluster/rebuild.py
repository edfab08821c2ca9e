"""A worker group that outlasts its processes: where a rank dies or hangs, all of them are replaced by fresh ones.

All of them, because a collective with a missing peer cannot be trusted: the others may wait in it for ever, or have
got half of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.group import WorkerGroup
from cluster.ray_facts import total_resources
from cluster.recovery import WorkersLost, in_words, patience
from cluster.roles import GroupKind
from scheduler.plan import IterationPlan, IterationResult
from workers.config import WorkerDescription

_log = logging.getLogger(__name__)

PAUSES_S = (0.0, 1.0, 5.0)
"""Before each attempt to start a group; after the last one it is given up."""
MOST_IN_A_ROW = 8
"""Losses without a single iteration in between after which a group is given up. More than a request is tried again
(`scheduler.losses`), so that one that kills the workers goes first."""
SLOWEST_START = 10.0
"""A start may take so many times what the first one took, and `hang_seconds` more."""
Start = Callable[[], Awaitable[WorkerGroup]]


class LastingGroup:
    """To the iteration loop an executor, and its recovery. `start` brings up a group like the first one, `name` is
    for people. What happens is told in `incidents`, one line each, and once in the log."""

    def __init__(self, first: WorkerGroup, start: Start, name: str, hang_seconds: float, start_s: float) -> None:
        self._group = first
        self._start = start
        self._name = name
        self._hang_seconds = hang_seconds
        self._start_limit_s = hang_seconds + SLOWEST_START * start_s
        self._in_a_row = 0
        self._wake: Callable[[], None] = lambda: None
        self.incidents: list[str] = []

    @classmethod
    async def begin(cls, start: Start, name: str, hang_seconds: float) -> LastingGroup:
        """Start the first one. Raises what `start` raises."""
        begun = time.monotonic()
        first = await start()
        return cls(first, start, name, hang_seconds, time.monotonic() - begun)

    # An executor.

    async def execute(self, plan: IterationPlan) -> IterationResult:
        result = await self._group.execute(plan)
        self._in_a_row = 0
        return result

    async def close(self) -> None:
        await self._group.close()

    # Recovery.

    def patience(self, predicted_s: float | None) -> float:
        return patience(self._hang_seconds, predicted_s)

    def watch(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._group.on_death(wake)

    def dead(self) -> WorkersLost | None:
        said = self._group.obituary()
        return WorkersLost(said) if said else None

    async def replace(self, lost: WorkersLost) -> LastingGroup:
        """Itself, on fresh processes. Raises WorkersLost where no group could be started, or where it dies again and
        again."""
        begun = time.monotonic()
        cause = await self._cause(lost)
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise WorkersLost(f"{cause}; lost {MOST_IN_A_ROW} times in a row without an iteration in between")
        self._tell(logging.ERROR, f"{cause}; rebuilding it")
        await self._group.destroy()
        self._group = await self._started(cause)
        self._group.on_death(self._wake)
        self._tell(logging.WARNING, f"rebuilt after {time.monotonic() - begun:.1f} s")
        return self

    async def _cause(self, lost: WorkersLost) -> str:
        if not lost.hung:
            return str(lost)
        mute = await self._group.silent()
        return f"{mute} hung: {lost}" if mute else f"{lost}, although every rank is there"

    async def _started(self, cause: str) -> WorkerGroup:
        failed = ""
        for pause in PAUSES_S:
            await asyncio.sleep(pause)
            try:
                return await asyncio.wait_for(self._start(), self._start_limit_s)
            except ValueError as error:  # for the operator: trying again does not help
                failed = str(error)
                break
            except Exception as error:
                failed = in_words(error)
                self._tell(logging.WARNING, f"could not be rebuilt: {failed}")
        raise WorkersLost(f"{cause}, and no new group could be started: {failed}")

    def _tell(self, level: int, what: str) -> None:
        self.incidents.append(f"{self._name}: {what}")
        _log.log(level, "%s: %s", self._name, what)

    async def give_back(self) -> None:
        await self._group.give_back()

    # What is known of it.

    async def pids(self) -> list[int]:
        return await self._group.pids()

    @property
    def ranks(self) -> list[ActorHandle[Any]]:
        """Of the group as it is now."""
        return self._group.ranks

    @property
    def transport(self) -> str:
        return self._group.transport

    @property
    def descriptions(self) -> list[WorkerDescription]:
        return self._group.descriptions

    @property
    def num_blocks(self) -> int:
        return self._group.num_blocks

    @property
    def swap_blocks(self) -> int:
        """Of host memory."""
        return self._group.swap_blocks


async def lasting_group(
    kind: GroupKind, index: int, model_dir: str, name: str, say: Callable[[str], None], before: EngineInfo | None
) -> LastingGroup:
    """Worker group `index` of an engine. Its KV pool, on the device and on the host, has the same size in all its
    lives, and that of `before`, an earlier life of the engine: what was admitted has to fit. Raises ValueError, in one
    line, for what cannot be served.
    """
    config = kind.config
    num_blocks = config.num_blocks if before is None else before.blocks_of(kind.role)
    swap = None if before is None or config.preempt != "swap" else before.swap_blocks
    device = device_of(config)

    async def start() -> WorkerGroup:
        nonlocal num_blocks, swap
        sized = config.model_copy(update={"num_blocks": num_blocks})
        group = await WorkerGroup.start(sized, model_dir, device, name, say, swap)
        num_blocks, swap = group.num_blocks, group.swap_blocks
        return group

    called = "the worker group" if config.group_count == 1 else f"worker group {index + 1}"
    return await LastingGroup.begin(start, called, config.hang_seconds)


def device_of(config: EngineConfig) -> str:
    """What the ranks will run on, by what the cluster has: the scheduler's own machine may have no GPU."""
    if config.device != "auto":
        return config.device
    with suppress(Exception):
        if total_resources().get("GPU", 0) >= 1:
            return "cuda"
    return "cpu"
