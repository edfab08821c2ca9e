"""The whole engine in one process, without Ray: the same loop, scheduler and worker as the cluster's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from cluster.assembly import engine_info, make_scheduler, worker_config
from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.executor import LocalExecutor
from cluster.loop import IterationLoop, IterationRecord
from cluster.mailbox import Mailboxes
from cluster.metrics import EngineMetrics
from cluster.sizing import kv_blocks
from cluster.tuning import Tuning, policy_for, tune
from scheduler.request import Delta, Request
from scheduler.scheduler import Scheduler
from workers.checkpoint import resolve
from workers.config import WorkerDescription
from workers.worker import Worker


class LocalEngine:
    """An Engine on one worker in this process (so `tp` and `groups` must be 1). Start it inside an event loop."""

    def __init__(
        self, config: EngineConfig, info: EngineInfo, executor: LocalExecutor, tuning: Tuning | None = None
    ) -> None:
        self.observers: list[Callable[[IterationRecord], None]] = []
        self.info = info
        self._config = config
        self._executor = executor
        self._tuning = tuning
        self._mailboxes = Mailboxes()
        self._metrics = EngineMetrics(info.served_model_name)
        self._loop = IterationLoop(
            make_scheduler(config, info, tuning),
            executor,
            clock=time.monotonic,
            publish=self._mailboxes.deliver,
            observe=self._observe,
            overlap=config.overlap,
        )
        self._task = asyncio.create_task(self._loop.run())

    @classmethod
    async def start(cls, config: EngineConfig) -> LocalEngine:
        """Load the model and start the loop. Raises ValueError with one line where the configuration cannot work."""
        if config.tp != 1 or config.groups != 1:
            raise ValueError("the in-process engine has one worker; use a cluster for tp or groups above 1")
        worker, description, num_blocks = await asyncio.to_thread(_load, config)
        info = engine_info(config, worker.config.model_dir, [description], num_blocks, transport="in-process")
        executor = LocalExecutor(worker)
        tuning = await tune(config, info, executor, time.monotonic) if config.policy == "slo" else None
        return cls(config, info, executor, tuning)

    def _observe(self, record: IterationRecord) -> None:
        for observer in self.observers:
            observer(record)
        self._metrics.observe(record)
        if self._tuning is not None:
            self._tuning.observe(record)

    @property
    def tuning(self) -> Tuning | None:
        """What is known of this worker's costs; None unless the engine was started with the slo policy."""
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

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        return self._loop.scheduler.stats()

    async def metrics(self) -> bytes:
        return self._metrics.expose([self._loop.scheduler.stats()])

    async def health(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._loop.heartbeat(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"no iteration was completed within {timeout_s:g} s") from None

    async def configure(self, policy: str, chunk_size: int) -> None:
        self._loop.scheduler.policy = policy_for(self._config, policy, chunk_size, self.info, self._tuning)
        self.info = replace(self.info, policy=policy, chunk_size=chunk_size)

    async def close(self) -> None:
        self._loop.close()
        await self._task
        await self._executor.close()


def _load(config: EngineConfig) -> tuple[Worker, WorkerDescription, int]:
    worker = Worker(worker_config(config, str(resolve(config.model))))
    description = worker.load()
    num_blocks = kv_blocks(config, [description])
    worker.allocate(num_blocks)
    return worker, description, num_blocks
