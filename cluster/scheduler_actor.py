"""The central scheduler: one actor that drives every worker group of an application, an iteration loop each.

Front ends subscribe, and each gets all new tokens of all its requests in one message, at most one an iteration: by a
line of its own where it is on the same machine, and by its polls otherwise. A front end that stops polling, or whose
line breaks, is taken for dead, and its requests are ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Any, NoReturn

import ray

from cluster.assembly import Common, engine_info, make_scheduler
from cluster.condition import figures
from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.instruments import Instruments
from cluster.loop import IterationLoop
from cluster.measuring import measure
from cluster.orphans import end_with_raylet
from cluster.placement import group_name
from cluster.rebuild import LastingGroup, lasting_group
from cluster.recovery import in_words
from cluster.roles import group_kinds
from cluster.routing import choose, takers
from cluster.separation import SeparatedGroup, Separation
from cluster.standing import Standing
from cluster.subscribers import Subscribers
from cluster.tuning import Tuning, apply_policy, with_outlook
from scheduler.codec import decode_requests, encode_deltas
from scheduler.errors import RequestRefused
from scheduler.exchange import Role
from scheduler.request import Delta, Finish, Request
from scheduler.slo import Promise

Refusal = tuple[str, str, str, str | None, float | None]
"""Request id, code, message, parameter and seconds to wait of a request that was not admitted."""
UNAVAILABLE = "engine_unavailable"
MOST_INCIDENTS = 20
ABANDONED_S = 60.0
"""Front ends that are replaced take seconds to be back."""

_log = logging.getLogger(__name__)


class SchedulerActor:
    """An async actor: its methods run on one event loop, so that nothing here needs a lock."""

    def __init__(self, config: EngineConfig, name: str, namespace: str, detached: bool = False) -> None:
        end_with_raylet()
        self._config = config
        self._name, self._namespace = name, namespace
        self._detached = detached
        self._starting: asyncio.Task[None] | None = None
        self._standing = Standing()
        self._groups: list[LastingGroup] = []
        self._loops: list[IterationLoop] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._kinds = group_kinds(config)
        self._tunings: dict[Role, Tuning | None] = {}
        self._separation: Separation | None = None
        self._instruments: Instruments | None = None
        self._subscribers = Subscribers(encode_deltas)
        self._homes: dict[str, IterationLoop] = {}

    # Coming up and going down.

    async def start(self, model_dir: str, before: EngineInfo | None = None) -> EngineInfo:
        """Bring the groups up, unless they are; whoever finds the actor new again asks for it. `before` is what was
        known of the engine in an earlier life of this actor. Raises ValueError, in one line, for what cannot be served.
        """
        if self._starting is None or self._is_over():
            self._starting = asyncio.create_task(self._start(model_dir, before))
        await asyncio.shield(self._starting)
        return self._standing.info()

    def _is_over(self) -> bool:
        """Whether there is nothing, or nothing left, of what was started."""
        assert self._starting is not None  # asked before
        if not self._starting.done():
            return False
        return self._starting.exception() is not None or not takers(self._loops)

    async def _start(self, model_dir: str, before: EngineInfo | None) -> None:
        await self.close()
        self._groups, self._loops, self._tasks = [], [], []
        self._separation = None
        self._standing.begin(before)
        config = self._config
        try:
            for index, kind in enumerate(self._kinds):
                name = group_name(self._name, self._namespace, index)
                told = self._standing.told_by("" if config.group_count == 1 else f" (group {index + 1})")
                self._groups.append(await lasting_group(kind, index, model_dir, name, told, before))
            first = self._groups[0]
            pools = [group.num_blocks for group in self._groups]
            swap = min((group.swap_blocks for group in self._groups if group.swap_blocks), default=0)
            info = engine_info(config, model_dir, first.descriptions, pools, first.transport, swap)
            info = await self._tune(info, trusted=before is not None)
            tunings = [self._tunings.get(kind.role) for kind in self._kinds]
            self._instruments = Instruments(config, info.served_model_name, tunings[0], tunings)
            self._make_loops(info, self._instruments)
            if config.separated:
                await self._separate(self._instruments)
            self._tasks += [asyncio.create_task(loop.run()) for loop in self._loops]
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._look_after_subscribers()))
        self._standing.is_up(info)
        if before is not None:
            self._hold(before)

    async def close(self) -> None:
        for loop in self._loops:
            loop.close()
        if self._separation is not None:
            self._separation.close()
        self._subscribers.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(group.close() for group in self._groups))
        if self._instruments is not None:
            self._instruments.log.close()

    def progress(self) -> str:
        return self._standing.progress

    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before everything is up."""
        return self._standing.info()

    def promises(self, prompt_tokens: list[int]) -> list[Promise | None]:
        """What is promised by default to prompts of these lengths; None where the workers were not measured."""
        tuning = self._tunings.get(self._kinds[0].role)
        return [None if tuning is None else tuning.promises.promise(tokens) for tokens in prompt_tokens]

    def pid(self) -> int:
        return os.getpid()

    async def pids(self) -> list[list[int]]:
        """Process ids of every group's ranks."""
        return [await group.pids() for group in self._groups]

    async def _tune(self, info: EngineInfo, trusted: bool) -> EngineInfo:
        """With what can be promised then."""

        def progress(done: int, of: int) -> None:
            self._standing.progress = f"measuring iterations ({100 * done // of} %)"

        self._tunings = await measure(self._config, info, self._kinds, self._groups, progress, trusted)
        return with_outlook(self._config, info, self._tunings[self._kinds[0].role])

    def _make_loops(self, info: EngineInfo, instruments: Instruments) -> None:
        common = Common()
        for index, (kind, group) in enumerate(zip(self._kinds, self._groups, strict=True)):
            tuning = self._tunings[kind.role]
            scheduler = make_scheduler(
                kind.config, info, tuning, role=kind.role, num_blocks=group.num_blocks, common=common
            )
            lasting = SeparatedGroup(group, index, lambda: self._separation) if self._config.separated else group
            self._loops.append(
                IterationLoop(
                    scheduler,
                    lasting,
                    clock=time.monotonic,
                    publish=self._publish,
                    observer=instruments.of(index),
                    predict=None if tuning is None else tuning.predict,
                    overlap=self._config.overlap,
                    recovery=lasting,
                    on_step=self._pump,
                    send_first=info.device != "cpu",
                )
            )

    async def _separate(self, instruments: Instruments) -> None:
        assert instruments.transfers is not None  # those of a separated engine
        self._separation = Separation(self._loops, self._groups, time.monotonic, instruments.transfers)
        self._standing.progress = "linking prefill and decode groups"
        await self._separation.link_all()

    def _pump(self) -> None:
        if self._separation is not None:
            self._separation.pump()

    # Requests.

    def subscribe(self, subscriber: str, instead_of: str = "", known: EngineInfo | None = None) -> EngineInfo:
        """Whatever is known of the one before is ended, unheard. `known` is what the front end knows of the engine: who
        restarted it may not have heard of the last change. Raises EngineUnavailable before everything is up."""
        info = self._standing.info()
        if known is not None and known.revision > info.revision:
            info = self._hold(known)
        self.unsubscribe(instead_of)
        self._subscribers.add(subscriber)
        return info

    async def line(self, subscriber: str) -> str:
        """A path at which a subscriber of this machine that has no requests yet can have its tokens from then on; empty
        where there can be none. Raises Unsubscribed."""
        try:
            return await self._subscribers.line(subscriber, lambda: self.unsubscribe(subscriber))
        except OSError as error:
            _log.warning("front ends have to poll, for there can be no sockets: %s", in_words(error))
            return ""

    def submit(self, subscriber: str, data: bytes, again: bool = False) -> list[Refusal]:
        """Admit an encoded batch of requests; those that are not admitted come back with the reason. `again`: they were
        admitted before, so that no bound of the queue is for them. Raises Unsubscribed."""
        self._subscribers.check(subscriber)
        refusals: list[Refusal] = []
        for request in decode_requests(data):
            try:
                self._add(subscriber, request, again)
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
            finish, loop = Finish.STOP if stopped else Finish.ABORT, self._homes.get(request_id)
            if self._separation is not None:
                self._separation.abort(request_id, finish)
            elif loop is not None:
                loop.abort(request_id, finish)

    async def poll(self, subscriber: str, timeout_s: float, revision: int) -> tuple[bytes, EngineInfo | None]:
        """All that is new for a subscriber: encoded deltas, or nothing where nothing came in time; and the engine's
        facts, where they are not those of the `revision` that it knows. Raises Unsubscribed."""
        return await self._subscribers.poll(subscriber, timeout_s), self._standing.unless_known(revision)

    async def drain(self, reason: str, seconds: float) -> bool:
        """Take no more requests, from now on; let those that are there finish within `seconds`; end what is left with
        an error that its client is told. Returns whether there were any."""
        self._standing.draining = reason
        any_there, until = bool(self._homes), time.monotonic() + seconds
        while self._homes and time.monotonic() < until:  # noqa: ASYNC110 - requests end in many places
            await asyncio.sleep(0.05)
        for loop in self._loops:
            loop.end_requests(reason)
        return any_there

    def unsubscribe(self, subscriber: str) -> None:
        self.abort(self._subscribers.remove(subscriber), stopped=False)
        for loop in self._loops:
            loop.tell_ends()  # before their ids may come again

    def _add(self, subscriber: str, request: Request, again: bool) -> None:
        if request.request_id in self._homes:
            raise RequestRefused("duplicate_request", f"request {request.request_id!r} is running already")
        if self._standing.draining is not None:
            raise EngineUnavailable(self._standing.draining)
        loop = choose(takers(self._loops) or self._nobody(), request, time.monotonic())
        loop.add(request, again=again)
        self._homes[request.request_id] = loop
        self._subscribers.owns(subscriber, request.request_id)

    def _nobody(self) -> NoReturn:
        failures = [loop.failure for loop in self._loops if loop.failure is not None]
        raise EngineUnavailable(failures[0] if failures else self._standing.unavailable())

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish is not None:
                self._homes.pop(delta.request_id, None)
        self._subscribers.publish(deltas)

    async def _look_after_subscribers(self) -> None:
        """End the requests of those that are silent; and, where nobody else would, the engine that nobody wants."""
        wanted = time.monotonic()
        while True:
            await asyncio.sleep(1)
            for subscriber in self._subscribers.silent():
                self.unsubscribe(subscriber)
            if self._subscribers:
                wanted = time.monotonic()
            elif self._detached and time.monotonic() > wanted + ABANDONED_S:
                _log.warning("nobody has subscribed for %g s: the engine ends", ABANDONED_S)
                await asyncio.gather(*(group.close() for group in self._groups))
                ray.kill(ray.get_runtime_context().current_actor)

    # Figures and control.

    async def stats(self) -> dict[str, Any]:
        """The groups' figures added up, and each group's own; what became of their workers."""
        return {
            **figures(self._loops, self._config.policy),
            "mode": self._config.mode,
            **({} if self._separation is None else {"transfers": self._separation.figures()}),
            "messages": self._subscribers.messages,
            "not_ready": self._standing.why_not_ready(self._loops),
            "incidents": self.incidents()[1][-MOST_INCIDENTS:],
        }

    def incidents(self) -> tuple[str, list[str]]:
        """What died and what became of it since this process began, which has an id of its own."""
        return self._standing.incidents(self._groups)

    async def metrics(self) -> bytes:
        if self._instruments is None:
            raise EngineUnavailable(self._standing.unavailable())
        return self._instruments.expose([loop.scheduler.stats() for loop in self._loops])

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The decision log, of all groups."""
        return [] if self._instruments is None else self._instruments.log.entries(after, limit)

    async def health(self, timeout_s: float) -> str:
        """Empty after a real forward on every group; else why not."""
        if reason := self._standing.why_not_ready(self._loops):
            return reason
        try:
            await asyncio.wait_for(asyncio.gather(*(loop.heartbeat() for loop in self._loops)), timeout_s)
        except TimeoutError:
            return f"no iteration was completed within {timeout_s:g} s"
        except EngineUnavailable as error:
            return str(error)
        return ""

    def configure(self, policy: str, chunk_size: int) -> EngineInfo:
        """Every front end is told. Raises ValueError for an unknown policy."""
        info = self._standing.info()
        return self._hold(replace(info, policy=policy, chunk_size=chunk_size, revision=info.revision + 1))

    def _hold(self, wanted: EngineInfo) -> EngineInfo:
        """Have the policy of `wanted`. Raises ValueError for an unknown one."""
        info = self._standing.info()
        for kind, loop in zip(self._kinds, self._loops, strict=True):
            tuning = self._tunings[kind.role]
            apply_policy(loop.scheduler, kind.config, wanted.policy, wanted.chunk_size, info, tuning)
        self._subscribers.wake()
        return self._standing.hold(wanted)
