"""Who runs a plan. The executor is the only difference between a server, a unit test and a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from scheduler.plan import IterationPlan, IterationResult
from workers.compute_thread import ComputeThread

if TYPE_CHECKING:  # torch is loaded by those who build a worker, not by those who only drive one
    from workers.worker import Worker


class Executor(Protocol):
    """Runs plans in the order in which `execute` was called, several of which may be under way.

    `execute` raises whatever made the workers unusable; what goes wrong with one sequence is in the result.
    """

    def execute(self, plan: IterationPlan) -> Awaitable[IterationResult]: ...

    async def close(self) -> None: ...


class LocalExecutor:
    """One worker in this process, on the thread that it was loaded on, so that the event loop stays free."""

    def __init__(self, worker: Worker, thread: ComputeThread) -> None:
        self._worker = worker
        self._thread = thread

    async def execute(self, plan: IterationPlan) -> IterationResult:
        return await asyncio.wrap_future(self._thread.submit(self._worker.execute, plan))

    async def close(self) -> None:
        self._thread.close()
        self._worker.close()
