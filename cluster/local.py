"""The whole engine in one process, without Ray: the same loop, scheduler and worker as the cluster's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from cluster.assembly import engine_info, make_scheduler, worker_config
from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.executor import LocalExecutor
from cluster.instruments import Instruments
from cluster.loop import IterationLoop
from cluster.mailbox import Mailboxes
from cluster.sizing import kv_blocks, swap_blocks
from cluster.tuning import Tuning, apply_policy, tune, with_outlook
from scheduler.request import Delta, Finish, Request
from scheduler.scheduler import Scheduler
from workers.checkpoint import resolve
from workers.compute_thread import ComputeThread
from workers.config import WorkerDescription
from workers.worker import Worker


class LocalEngine:
    """An Engine on one worker in this process (so `tp` and `groups` must be 1). Start it inside an event loop."""

    def __init__(
        self, config: EngineConfig, info: EngineInfo, executor: LocalExecutor, tuning: Tuning | None = None
    ) -> None:
        self.info = info
        self._config = config
        self._executor = executor
        self._tuning = tuning
        self._mailboxes = Mailboxes()
        self._instruments = Instruments(config, info.served_model_name, tuning)
        watch = self._instruments.of(0)
        self.observers = watch.more
        self._loop = IterationLoop(
            make_scheduler(config, info, tuning),
            executor,
            clock=time.monotonic,
            publish=self._mailboxes.deliver,
            observer=watch,
            predict=None if tuning is None else tuning.predict,
            overlap=config.overlap,
        )
        self._task = asyncio.create_task(self._loop.run())

    @classmethod
    async def start(cls, config: EngineConfig) -> LocalEngine:
        """Load the model and start the loop. Raises ValueError with one line where the configuration cannot work."""
        if config.tp != 1 or config.group_count != 1:
            raise ValueError("the in-process engine has one worker; use a cluster for tp or groups above 1")
        thread = ComputeThread()
        try:
            worker, description, num_blocks, swap = await asyncio.wrap_future(thread.submit(_load, config))
        except BaseException:
            thread.close()
            raise
        info = engine_info(config, worker.config.model_dir, [description], [num_blocks], "in-process", swap)
        executor = LocalExecutor(worker, thread)
        tuning = await tune(config, info, executor, time.monotonic)
        return cls(config, with_outlook(config, info, tuning), executor, tuning)

    @property
    def tuning(self) -> Tuning | None:
        """What is known of this worker's costs; None where it was not measured (`profile_seconds` 0)."""
        return self._tuning

    @property
    def scheduler(self) -> Scheduler:
        return self._loop.scheduler

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        self._mailboxes.open(request.request_id)
        try:
            self._loop.add(request)
        except BaseException:
            self._mailboxes.close(request.request_id)
            raise
        async with aclosing(self._mailboxes.read(request.request_id, self.abort)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self._loop.abort(request_id, Finish.STOP if stopped else Finish.ABORT)

    async def stats(self) -> dict[str, Any]:
        return self._loop.scheduler.stats()

    async def metrics(self) -> bytes:
        return self._instruments.expose([self._loop.scheduler.stats()])

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        return self._instruments.log.entries(after, limit)

    async def health(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._loop.heartbeat(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"no iteration was completed within {timeout_s:g} s") from None

    async def configure(self, policy: str, chunk_size: int) -> None:
        apply_policy(self._loop.scheduler, self._config, policy, chunk_size, self.info, self._tuning)
        self.info = replace(self.info, policy=policy, chunk_size=chunk_size)

    async def close(self) -> None:
        self._loop.close()
        await self._task
        await self._executor.close()
        self._instruments.log.close()


def _load(config: EngineConfig) -> tuple[Worker, WorkerDescription, int, int]:
    """With its KV blocks, and those of host memory."""
    worker = Worker(worker_config(config, str(resolve(config.model))))
    description = worker.load()
    num_blocks = kv_blocks(config, [description])
    swap = swap_blocks(config, [description], num_blocks)
    worker.allocate(num_blocks, swap)
    return worker, description, num_blocks, swap
