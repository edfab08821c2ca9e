"""The process of a rank, wherever it runs: a group that was lost is ended by force, whatever state its ranks are in."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_facts import node_managers

NODE_ANSWERS_S = 2.0
KILL_S = 5.0
"""For a process to be gone after it was killed. Its memory is free then."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """`started` is the process' creation time: a process id alone may be given to somebody else."""

    node: str
    pid: int
    started: float

    @classmethod
    def own(cls) -> RankProcess:
        node = str(ray.get_runtime_context().get_node_id())
        return cls(node, os.getpid(), psutil.Process().create_time())

    async def kill(self) -> None:
        """SIGKILL, which also ends a process that is stopped, and wait until it is gone. A node that is gone took it
        along."""
        with suppress(Exception):
            if self.node == ray.get_runtime_context().get_node_id():
                await asyncio.to_thread(_kill, self.pid, self.started)
                return
            if not await asyncio.to_thread(node_answers, self.node):
                return
            remote: Any = ray.remote
            there = NodeAffinitySchedulingStrategy(self.node, soft=False)
            killing = remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=there)
            await asyncio.wait_for(killing.remote(self.pid, self.started), 2 * KILL_S)


def node_answers(node: str) -> bool:
    """Whether somebody listens where that node's raylet did: it may be dead for a while before Ray says so."""
    for address, port in node_managers(node):
        with suppress(OSError), socket.create_connection((address, port), NODE_ANSWERS_S):
            return True
    return False


def _kill(pid: int, started: float) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == started:
            process.kill()
            process.wait(KILL_S)
