"""The client handle of an event loop: an Engine whose scheduler is a Ray actor.

One task sends and one listens, both started with the handle and never from a request: a framework that cancels what a
request started cannot cut the others off.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.mailbox import Mailboxes
from cluster.placement import remove_orphans
from cluster.scheduler_actor import UNAVAILABLE, SchedulerActor
from cluster.transport import ENVIRONMENT
from scheduler.codec import decode_deltas, encode_requests
from scheduler.errors import RequestRefused
from scheduler.request import Delta, Request
from workers.checkpoint import resolve

POLL_S = 10.0
DEFAULT_NAME = "stallfree"
NAMESPACE = "stallfree"
CONCURRENCY = 10_000
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    stopped: bool


class AsyncCluster:
    """Made by `start` or `connect`, inside the event loop that will use it."""

    def __init__(self, scheduler: ActorHandle[Any], info: EngineInfo, owner: bool) -> None:
        self.scheduler = scheduler
        self.info = info
        self._owner = owner
        self._name = uuid.uuid4().hex
        self._mailboxes = Mailboxes()
        self._outbox: asyncio.Queue[Request | _Abort] = asyncio.Queue()
        self._failure: str | None = None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._send())]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        name: str | None = None,
        namespace: str = NAMESPACE,
        on_progress: Progress | None = None,
    ) -> AsyncCluster:
        """Start a scheduler and its worker groups on the connected Ray cluster, and wait until they serve.

        They die with this process. `name` is what others `connect` to. Raises ValueError, in one line, for what cannot
        be served, and EngineUnavailable where the actors die.
        """
        if config.separated:
            raise ValueError("--mode separated is not served yet; take --mode colocated")
        model_dir = await asyncio.to_thread(resolve, config.model)
        await asyncio.to_thread(remove_orphans)
        scheduler = _scheduler_actor(config, name or f"engine-{uuid.uuid4().hex[:12]}", namespace)
        try:
            info = await _started(scheduler, model_dir, on_progress)
        except BaseException:
            await _close(scheduler)
            raise
        return cls(scheduler, info, owner=True)

    @classmethod
    async def connect(cls, name: str = DEFAULT_NAME, *, namespace: str = NAMESPACE) -> AsyncCluster:
        """Attach to a running scheduler. Raises EngineUnavailable where there is none of that name."""
        try:
            return await cls.attach(ray.get_actor(name, namespace=namespace))
        except ValueError:
            raise EngineUnavailable(f"no engine of the name {name!r} runs on this Ray cluster") from None

    @classmethod
    async def attach(cls, scheduler: ActorHandle[Any]) -> AsyncCluster:
        """A handle of its own to a scheduler actor."""
        return cls(scheduler, cast(EngineInfo, await _asked(scheduler.info.remote())), owner=False)

    # The Engine.

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        self._mailboxes.open(request.request_id)
        self._outbox.put_nowait(request)
        async with aclosing(self._mailboxes.read(request.request_id, self.abort)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self._outbox.put_nowait(_Abort(request_id, stopped))

    async def stats(self) -> dict[str, Any]:
        return cast(dict[str, Any], await _asked(self.scheduler.stats.remote()))

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], await _asked(self.scheduler.iterations.remote(after, limit)))

    async def metrics(self) -> bytes:
        return cast(bytes, await _asked(self.scheduler.metrics.remote()))

    async def health(self, timeout_s: float) -> None:
        try:
            reason = await asyncio.wait_for(_asked(self.scheduler.health.remote(timeout_s)), timeout_s + 1)
        except TimeoutError:
            raise EngineUnavailable(f"the scheduler did not answer within {timeout_s:g} s") from None
        if reason:
            raise EngineUnavailable(str(reason))

    async def configure(self, policy: str, chunk_size: int) -> None:
        self.info = cast(EngineInfo, await _asked(self.scheduler.configure.remote(policy, chunk_size)))

    async def close(self) -> None:
        """End this handle's requests; and, where it started the engine, the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mailboxes.fail_all("the client was closed")
        if self._owner:
            await _close(self.scheduler)
        else:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(_asked(self.scheduler.unsubscribe.remote(self._name)), 5)

    # The two tasks.

    async def _send(self) -> None:
        """Requests and aborts in the order in which they were given, those that wait together in one message."""
        while True:
            batch = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            for run in _runs(batch):
                try:
                    await self._send_run(run)
                except (RayError, EngineUnavailable) as error:
                    self._fail(_reason(error))

    async def _send_run(self, run: list[Request] | list[_Abort]) -> None:
        if isinstance(run[0], _Abort):
            for stopped in (True, False):
                if ids := [abort.request_id for abort in run if abort.stopped is stopped]:
                    await self.scheduler.abort.remote(ids, stopped)
            return
        data = encode_requests(run)
        for request_id, code, *rest in await self.scheduler.submit.remote(self._name, data):
            refused = EngineUnavailable(rest[0]) if code == UNAVAILABLE else RequestRefused(code, *rest)
            self._mailboxes.post(request_id, refused)

    async def _listen(self) -> None:
        while True:
            try:
                message: bytes = await self.scheduler.poll.remote(self._name, POLL_S)
            except RayError as error:
                self._fail(_reason(error))
                return
            if message:
                self._mailboxes.deliver(decode_deltas(message))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._mailboxes.fail_all(reason)


def _runs(batch: list[Request | _Abort]) -> list[list[Request] | list[_Abort]]:
    """Neighbours of one kind together: an abort must not overtake its request."""
    runs: list[list[Any]] = []
    for item in batch:
        if runs and type(runs[-1][0]) is type(item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return cast(list[list[Request] | list[_Abort]], runs)


def _scheduler_actor(config: EngineConfig, name: str, namespace: str) -> ActorHandle[Any]:
    actor: Any = (
        ray.remote(SchedulerActor)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENCY,
            runtime_env={"env_vars": ENVIRONMENT},
            name=name,
            namespace=namespace,
        )
        .remote(config, name, namespace)
    )
    return cast(ActorHandle[Any], actor)


async def _started(scheduler: ActorHandle[Any], model_dir: Path, on_progress: Progress | None) -> EngineInfo:
    start = asyncio.ensure_future(_asked(scheduler.start.remote(str(model_dir))))
    said = ""
    while not start.done():
        await asyncio.wait([start], timeout=0.5)
        if on_progress is not None and not start.done():
            with suppress(RayError, TimeoutError):
                now = str(await asyncio.wait_for(_asked(scheduler.progress.remote()), 5))
                if now != said:
                    on_progress(now)
                    said = now
    return cast(EngineInfo, start.result())


async def _close(scheduler: ActorHandle[Any]) -> None:
    """In order where it answers, by force in any case."""
    with suppress(RayError, TimeoutError, EngineUnavailable, ValueError):
        await asyncio.wait_for(_asked(scheduler.close.remote()), 8)
    with suppress(RayError):
        ray.kill(scheduler)
    with suppress(RayError, ConnectionError):
        await asyncio.to_thread(remove_orphans)


async def _asked(answer: Any) -> Any:
    """An actor's answer. ValueError and EngineUnavailable of the actor are raised as such, its death as the latter."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, ValueError | EngineUnavailable):
            raise type(error.cause)(str(error.cause)) from None
        raise
    except RayActorError as error:
        raise EngineUnavailable(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"the scheduler is gone: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
