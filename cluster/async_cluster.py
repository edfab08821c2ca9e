"""The client handle of an event loop: an Engine whose scheduler is a Ray actor.

One task sends and one listens, both started with the handle and never from a request: a framework that cancels what a
request started cannot cut the others off.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.mailbox import Mailboxes
from cluster.open_requests import OpenRequests
from cluster.placement import remove_orphans
from cluster.recovery import in_words
from cluster.scheduler_actor import UNAVAILABLE
from cluster.scheduler_handle import Progress, asked, end, gone, make_scheduler_actor, started, why_away
from cluster.subscribers import Unsubscribed
from cluster.token_line import TokenEar
from scheduler.codec import decode_deltas, encode_requests
from scheduler.errors import RequestRefused
from scheduler.request import Delta, Finish, Request
from workers.checkpoint import resolve

POLL_S = 3.0
CONNECT_S = 60.0
PAUSE_S = 0.25
"""Between attempts to find the scheduler again. An attempt is one call, which fails at once where there is no process.
"""
MOST_ATTEMPTS, LOST_S = 10, 60.0
"""A scheduler that has not been heard of for so many attempts and so long is given up."""
DEFAULT_NAME = "stallfree"
NAMESPACE = "stallfree"


_log = logging.getLogger(__name__)


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
        self.subscribed_as = uuid.uuid4().hex
        self._mailboxes = Mailboxes()
        self._outbox: asyncio.Queue[Request | _Abort] = asyncio.Queue()
        self._open = OpenRequests()
        self._failure: str | None = None
        self.away: str | None = None
        self._heard = 0
        self._ear: TokenEar | None = None
        self._task = asyncio.create_task(self._serve())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        name: str | None = None,
        namespace: str = NAMESPACE,
        on_progress: Progress | None = None,
        detached: bool = False,
    ) -> AsyncCluster:
        """Start a scheduler and its worker groups on the connected Ray cluster, and wait until they serve.

        They die with this process; `detached` ones do not, and one of that name that is there already is taken over.
        `name` is what others `connect` to. Raises ValueError, in one line, for what cannot be served, and
        EngineUnavailable where the actors die.
        """
        model_dir = await asyncio.to_thread(resolve, config.model)
        await asyncio.to_thread(remove_orphans)
        name = name or f"engine-{uuid.uuid4().hex[:12]}"
        scheduler = make_scheduler_actor(config, name, namespace, detached=detached)
        try:
            info = await started(scheduler, model_dir, on_progress)
        except BaseException:
            await end(scheduler)
            raise
        return cls(scheduler, info, owner=True)

    @classmethod
    async def connect(cls, name: str = DEFAULT_NAME, *, namespace: str = NAMESPACE) -> AsyncCluster:
        """Attach to a running scheduler, or to one that is coming back. Raises EngineUnavailable where there is none
        of that name, and where it does not come in time."""
        try:
            scheduler = ray.get_actor(name, namespace=namespace)
        except ValueError:
            raise EngineUnavailable(f"no engine of the name {name!r} runs on this Ray cluster") from None
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                return cls(scheduler, cast(EngineInfo, await asked(scheduler.info.remote())), owner=False)
            except EngineUnavailable:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.5)

    # The Engine.

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self.away is not None and len(self._open) >= self.info.most_requests:
            raise RequestRefused("queue_full", f"{len(self._open)} requests wait for the engine to be back; try later")
        self._mailboxes.open(request.request_id)
        self._open.open(request)
        self._outbox.put_nowait(request)
        try:
            async with aclosing(self._mailboxes.read(request.request_id, self.abort)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._open.close(request.request_id)

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self._open.ends(request_id, Finish.STOP if stopped else Finish.ABORT)
        self._outbox.put_nowait(_Abort(request_id, stopped))

    async def stats(self) -> dict[str, Any]:
        """With `not_ready`: why a new request would be refused or have to wait for workers; empty where neither."""
        self._check_there()
        return cast(dict[str, Any], await asked(self.scheduler.stats.remote()))

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        self._check_there()
        return cast(list[dict[str, Any]], await asked(self.scheduler.iterations.remote(after, limit)))

    async def metrics(self) -> bytes:
        self._check_there()
        return cast(bytes, await asked(self.scheduler.metrics.remote()))

    async def health(self, timeout_s: float) -> None:
        self._check_there()
        try:
            reason = await asyncio.wait_for(asked(self.scheduler.health.remote(timeout_s)), timeout_s + 1)
        except TimeoutError:
            raise EngineUnavailable(f"the scheduler did not answer within {timeout_s:g} s") from None
        if reason:
            raise EngineUnavailable(str(reason))

    async def configure(self, policy: str, chunk_size: int) -> None:
        self.info = cast(EngineInfo, await asked(self.scheduler.configure.remote(policy, chunk_size)))

    async def close(self) -> None:
        """End this handle's requests; and, where it started the engine, the engine."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._hang_up()
        self._mailboxes.fail_all("the client was closed")
        if self._owner:
            await end(self.scheduler)
        else:
            with suppress(RayError, TimeoutError, EngineUnavailable):
                await asyncio.wait_for(asked(self.scheduler.unsubscribe.remote(self.subscribed_as)), 5)

    async def drain(self, reason: str, seconds: float) -> None:
        """Take no more requests; what has not ended within `seconds` ends with an error, whoever's it is."""
        await asked(self.scheduler.drain.remote(reason, seconds))

    def _check_there(self) -> None:
        if self.away is not None:
            raise EngineUnavailable(self.away)

    def standing(self) -> None:
        """Raises EngineUnavailable once this handle has given up; not while it waits for a scheduler that restarts."""
        if self._failure is not None:
            raise EngineUnavailable(self._failure)

    # The conversation with the scheduler: one task that sends, one that listens, and what to do when it is cut off.

    async def _serve(self) -> None:
        try:
            reason = await self._talk()
        except Exception as error:  # a bug, but nobody is to wait for ever because of it
            _log.exception("the conversation with the scheduler broke off")
            reason = in_words(error)
        self._failure = reason
        self._mailboxes.fail_all(reason)

    async def _talk(self) -> str:
        """Until the scheduler is given up. Returns why."""
        attempts, heard, since = 0, self._heard, time.monotonic()
        while True:
            await asyncio.sleep(PAUSE_S if attempts > 1 else 0)
            try:
                if attempts:
                    await self._restarted()
                await self._subscribe()
                self.away = None
                await self._converse()
            except ActorDiedError as error:
                return gone(error)
            except (RayError, EngineUnavailable, Unsubscribed) as error:
                if self._heard > heard:
                    attempts, heard, since = 0, self._heard, time.monotonic()
                attempts += 1
                self.away = why_away(error)
                if attempts > MOST_ATTEMPTS and time.monotonic() > since + LOST_S:
                    return self.away or "the scheduler does not know this front end, again and again"

    async def _restarted(self) -> None:
        """Ray starts the actor's process anew, which knows nothing then; it is up when its groups are."""
        await self.scheduler.start.remote(self.info.model_dir, self.info)

    async def _subscribe(self) -> None:
        """By a new name, so that what was on the way to the old one reaches nobody; and give every open request again.
        Those that were to end have ended with the old one."""
        self._hang_up()
        await self._introduce()
        try:
            await self._get_a_line()
        except OSError as error:  # nobody can tell whether the scheduler takes it for connected
            _log.warning("the scheduler is polled, for a line to it cannot be had: %s", in_words(error))
            await self._introduce()
        while not self._outbox.empty():
            self._outbox.get_nowait()  # they are among the open ones
        self._mailboxes.deliver(self._open.take_ended())
        admitted, new = self._open.again()
        for requests, again in ((admitted, True), (new, False)):
            if requests:
                await self._submit(requests, again)

    async def _introduce(self) -> None:
        old, self.subscribed_as = self.subscribed_as, uuid.uuid4().hex
        self.info = cast(EngineInfo, await self.scheduler.subscribe.remote(self.subscribed_as, old, self.info))

    async def _get_a_line(self) -> None:
        """Where the scheduler is on this machine: there is nothing at the path that it says on any other."""
        path = await self.scheduler.line.remote(self.subscribed_as)
        if path:
            ear = TokenEar(self._hear)
            with suppress(FileNotFoundError):
                await ear.connect(path)
                self._ear = ear

    def _hang_up(self) -> None:
        if self._ear is not None:
            self._ear.close()
            self._ear = None

    async def _converse(self) -> None:
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._send())]
        if self._ear is not None:
            tasks.append(asyncio.create_task(self._until_lost(self._ear)))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> None:
        """Requests and aborts in the order in which they were given, those that wait together in one message."""
        while True:
            batch = [await self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            for run in _runs(batch):
                await self._send_run(run)

    async def _send_run(self, run: list[Request] | list[_Abort]) -> None:
        if isinstance(run[0], _Abort):
            for stopped in (True, False):
                if ids := [abort.request_id for abort in run if abort.stopped is stopped]:
                    await self.scheduler.abort.remote(ids, stopped)
            return
        await self._submit(run, again=False)

    async def _submit(self, requests: list[Request], again: bool) -> None:
        refusals = await self.scheduler.submit.remote(self.subscribed_as, encode_requests(requests), again)
        for request_id, code, *rest in refusals:
            refused = EngineUnavailable(rest[0]) if code == UNAVAILABLE else RequestRefused(code, *rest)
            self._mailboxes.post(request_id, refused)
        self._open.admitted({r.request_id for r in requests} - {refusal[0] for refusal in refusals})

    async def _listen(self) -> None:
        while True:
            message, info = await self.scheduler.poll.remote(self.subscribed_as, POLL_S, self.info.revision)
            self._heard += 1
            self.info = info or self.info
            if message:
                self._hear(message)

    def _hear(self, message: bytes) -> None:
        deltas = decode_deltas(message)
        self._open.see(deltas)
        self._mailboxes.deliver(deltas)
        self._heard += 1

    async def _until_lost(self, ear: TokenEar) -> None:
        """Whether the scheduler is lost, or merely knows this front end no more, will be heard when it is asked."""
        await ear.lost.wait()
        raise Unsubscribed(self.subscribed_as)


def _runs(batch: list[Request | _Abort]) -> list[list[Request] | list[_Abort]]:
    """Neighbours of one kind together: an abort must not overtake its request."""
    runs: list[list[Any]] = []
    for item in batch:
        if runs and type(runs[-1][0]) is type(item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return cast(list[list[Request] | list[_Abort]], runs)
