"""Who runs a plan. The executor is the only difference between a server, a unit test and a simulation."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from scheduler.plan import IterationPlan, IterationResult

if TYPE_CHECKING:  # torch is loaded by those who build a worker, not by those who only drive one
    from workers.worker import Worker


class Executor(Protocol):
    """Runs plans in the order in which `execute` was called, several of which may be under way.

    `execute` raises whatever made the workers unusable; what goes wrong with one sequence is in the result.
    """

    async def execute(self, plan: IterationPlan) -> IterationResult: ...

    async def close(self) -> None: ...


class LocalExecutor:
    """One worker in this process, on a thread of its own so that the event loop stays free."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")

    async def execute(self, plan: IterationPlan) -> IterationResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.execute, plan)

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._worker.close()
