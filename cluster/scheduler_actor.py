"""The central scheduler: one actor that drives every worker group of an application, an iteration loop each.

Front ends subscribe; each of them polls, and gets all new tokens of all its requests in one message, at most one an
iteration. A front end that stops polling is taken for dead, and its requests are ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster.assembly import engine_info, make_scheduler
from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.group import WorkerGroup
from cluster.instruments import GroupInstruments, Instruments
from cluster.loop import IterationLoop
from cluster.placement import group_name
from cluster.ray_facts import total_resources
from cluster.routing import least_loaded
from cluster.subscribers import Subscribers
from cluster.tuning import Tuning, apply_policy, tune, with_outlook
from scheduler.codec import decode_requests, encode_deltas
from scheduler.errors import RequestRefused
from scheduler.request import Delta, Finish, Request
from scheduler.slo import Promise

Refusal = tuple[str, str, str, str | None, float | None]
"""Request id, code, message, parameter and seconds to wait of a request that was not admitted."""
UNAVAILABLE = "engine_unavailable"


class SchedulerActor:
    """An async actor: its methods run on one event loop, so that nothing here needs a lock."""

    def __init__(self, config: EngineConfig, name: str, namespace: str) -> None:
        self._config = config
        self._name, self._namespace = name, namespace
        self._progress = "starting"
        self._groups: list[WorkerGroup] = []
        self._loops: list[IterationLoop] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._tuning: Tuning | None = None
        self._info: EngineInfo | None = None
        self._instruments: Instruments | None = None
        self._subscribers = Subscribers(encode_deltas)
        self._homes: dict[str, IterationLoop] = {}

    # Coming up and going down.

    async def start(self, model_dir: str) -> EngineInfo:
        """Bring the groups up. Raises ValueError, in one line, for what cannot be served."""
        config = self._config
        device = _device(config)
        for index in range(config.groups):
            name = group_name(self._name, self._namespace, index)
            say = self._say_for(index)
            self._groups.append(await WorkerGroup.start(config, model_dir, device, name, say))
        first = self._groups[0]
        num_blocks = min(group.num_blocks for group in self._groups)
        self._info = engine_info(config, model_dir, first.descriptions, num_blocks, first.transport)
        await self._tune()
        self._instruments = Instruments(config, self._info.served_model_name, self._tuning)
        for index, group in enumerate(self._groups):
            self._run_loop(group, self._instruments.of(index))
        self._tasks.append(asyncio.create_task(self._end_requests_of_the_dead()))
        self._progress = "ready"
        return self._info

    async def close(self) -> None:
        for loop in self._loops:
            loop.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(group.close() for group in self._groups))
        if self._instruments is not None:
            self._instruments.log.close()

    def progress(self) -> str:
        return self._progress

    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before everything is up."""
        if self._info is None or self._progress != "ready":
            raise EngineUnavailable(f"the engine is {self._progress}")
        return self._info

    def promises(self, prompt_tokens: list[int]) -> list[Promise | None]:
        """What is promised by default to prompts of these lengths; None where the workers were not measured."""
        tuning = self._tuning
        return [None if tuning is None else tuning.promises.promise(tokens) for tokens in prompt_tokens]

    async def pids(self) -> list[list[int]]:
        """Process ids of every group's ranks."""
        return [await group.pids() for group in self._groups]

    def _say_for(self, index: int) -> Callable[[str], None]:
        def say(what: str) -> None:
            self._progress = what if self._config.groups == 1 else f"{what} (group {index + 1})"

        return say

    async def _tune(self) -> None:
        assert self._info is not None  # known before anything is measured

        def progress(done: int, of: int) -> None:
            self._progress = f"measuring iterations ({100 * done // of} %)"

        self._tuning = await tune(self._config, self._info, self._groups[0], time.monotonic, progress)
        self._info = with_outlook(self._config, self._info, self._tuning)

    def _run_loop(self, group: WorkerGroup, watch: GroupInstruments) -> None:
        assert self._info is not None  # the groups are up
        loop = IterationLoop(
            make_scheduler(self._config, self._info, self._tuning),
            group,
            clock=time.monotonic,
            publish=self._publish,
            observer=watch,
            predict=None if self._tuning is None else self._tuning.predict,
            overlap=self._config.overlap,
        )
        self._loops.append(loop)
        self._tasks.append(asyncio.create_task(loop.run()))

    # Requests.

    def submit(self, subscriber: str, data: bytes) -> list[Refusal]:
        """Admit an encoded batch of requests; those that are not admitted come back with the reason."""
        refusals: list[Refusal] = []
        for request in decode_requests(data):
            try:
                self._add(subscriber, request)
            except RequestRefused as refused:
                refusals.append(
                    (request.request_id, refused.code, refused.message, refused.param, refused.retry_after_s)
                )
            except EngineUnavailable as error:
                refusals.append((request.request_id, UNAVAILABLE, str(error), None, None))
        return refusals

    def abort(self, request_ids: list[str], stopped: bool) -> None:
        """`stopped`: their readers have had all they asked for."""
        for request_id in request_ids:
            loop = self._homes.get(request_id)
            if loop is not None:
                loop.abort(request_id, Finish.STOP if stopped else Finish.ABORT)

    async def poll(self, subscriber: str, timeout_s: float) -> bytes:
        """All that is new for a subscriber: encoded deltas, or nothing where nothing came in time."""
        return await self._subscribers.poll(subscriber, timeout_s)

    def end_requests(self, reason: str) -> int:
        """End every request with an error that its client is told, because the engine is about to go. How many."""
        ended = len(self._homes)
        for loop in self._loops:
            loop.end_requests(reason)
        return ended

    def unsubscribe(self, subscriber: str) -> None:
        self.abort(self._subscribers.remove(subscriber), stopped=False)

    def _add(self, subscriber: str, request: Request) -> None:
        if request.request_id in self._homes:
            raise RequestRefused("duplicate_request", f"request {request.request_id!r} is running already")
        standing = [loop for loop in self._loops if loop.failure is None]
        if not standing:
            raise EngineUnavailable(self._loops[0].failure or "no worker group" if self._loops else self._progress)
        loop = least_loaded(standing)
        loop.add(request)
        self._homes[request.request_id] = loop
        self._subscribers.owns(subscriber, request.request_id)

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self._homes.pop(delta.request_id, None)
        self._subscribers.publish(deltas)

    async def _end_requests_of_the_dead(self) -> None:
        while True:
            await asyncio.sleep(5)
            for subscriber in self._subscribers.silent():
                self.unsubscribe(subscriber)

    # Figures and control.

    async def stats(self) -> dict[str, Any]:
        """The groups' figures added up, and each group's own."""
        groups = [loop.scheduler.stats() for loop in self._loops]
        added = ("running", "waiting", "blocks_total", "blocks_free", "iterations", "preemptions", "tokens_outstanding")
        policy = self._loops[0].scheduler.policy.name if self._loops else self._config.policy
        failures = [loop.failure for loop in self._loops if loop.failure is not None]
        return {
            "policy": policy,
            **{name: sum(group[name] for group in groups) for name in added},
            "messages": self._subscribers.messages,
            "failures": failures,
            "groups": groups,
        }

    async def metrics(self) -> bytes:
        if self._instruments is None:
            raise EngineUnavailable(f"the engine is {self._progress}")
        return self._instruments.expose([loop.scheduler.stats() for loop in self._loops])

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The decision log, of all groups."""
        return [] if self._instruments is None else self._instruments.log.entries(after, limit)

    async def health(self, timeout_s: float) -> str:
        """Empty after a real forward on every group; else why not."""
        if self._progress != "ready":
            return f"the engine is {self._progress}"
        try:
            await asyncio.wait_for(asyncio.gather(*(loop.heartbeat() for loop in self._loops)), timeout_s)
        except TimeoutError:
            return f"no iteration was completed within {timeout_s:g} s"
        except EngineUnavailable as error:
            return str(error)
        return ""

    async def configure(self, policy: str, chunk_size: int) -> EngineInfo:
        """Raises ValueError for an unknown policy."""
        info = self.info()
        for loop in self._loops:
            apply_policy(loop.scheduler, self._config, policy, chunk_size, info, self._tuning)
        self._info = replace(info, policy=policy, chunk_size=chunk_size)
        return self._info


def _device(config: EngineConfig) -> str:
    """What the ranks will run on, by what the cluster has: the scheduler's own machine may have no GPU."""
    if config.device != "auto":
        return config.device
    with suppress(Exception):
        if total_resources().get("GPU", 0) >= 1:
            return "cuda"
    return "cpu"
