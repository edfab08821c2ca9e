"""Which processes of a machine wait for which, where ranks compute on its processors.

A forward on several threads is hundreds of short parallel regions, at the end of which each thread waits for all
others. Whatever interrupts one of them interrupts the whole forward. What a token goes through on its way to a client
(scheduler, API replica, proxy) is to do so: with all of these stepped back a step is shorter, but tokens are late where
clients see them (docs/performance.md has both figures). What only looks after the others is not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

NICENESS = 15
"""What Ray gives all workers by default."""

_RAYLET = "raylet"
_KEPT = ("ray::RankActor", "ray::SchedulerActor", "ray::ServeReplica", "ray::ProxyActor", "ray::IDLE")
"""Beginnings of command lines: those who compute, who carry tokens, and who may become one of them."""


def step_back(pid: int | None = None) -> None:
    """Have a process (this one by default), in all its threads, give way to those that compute. Threads that it starts
    later, and processes, take that after the thread that starts them. One that has stepped back further stays there."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError):  # it may have ended
        for thread in _threads(pid):
            if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
                os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def background_steps_back() -> None:
    """Have those of Ray's processes below this one do so that no token passes: the controller, the GCS, their helpers.
    Not the raylet, whose children the ranks are."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name() != _RAYLET and not " ".join(process.cmdline()).startswith(_KEPT):
                step_back(process.pid)


def _threads(pid: int) -> list[int]:
    """On Linux each thread has a niceness of its own; elsewhere the process has one."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [pid]
