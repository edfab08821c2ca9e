"""Which processes of a machine wait for which, where ranks compute on its processors.

A forward on several threads is hundreds of short parallel regions, at the end of which each thread waits for all
others. Whatever interrupts one of them interrupts the whole forward. What a token goes through on its way to a client
(scheduler, API replica, HAProxy or Serve's proxy) is to do so: with all of these stepped back a step is shorter, but
tokens are late where clients see them (docs/performance.md has both figures). What only looks after the others is not.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

NICENESS = 15
"""What Ray gives all workers by default."""

_KEPT_NAMES = ("raylet", "haproxy")
"""The raylet's children are the ranks."""
_KEPT = (
    *("ray::RankActor", "ray::SchedulerActor", "ray::ServeReplica", "ray::ProxyActor", "ray::IDLE"),
    *("ray::HAProxyManager", "ray::SERVE_PROXY_ACTOR"),
)
"""Beginnings of command lines: who computes, carries tokens or starts what does, and who may come to do so."""


def step_back(pid: int | None = None) -> None:
    """Have a process (this one by default), in all its threads, give way to those that compute. Threads that it starts
    later, and processes, take that after the thread that starts them. One that has stepped back further stays there."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError):  # it may have ended
        for thread in _threads(pid):
            if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
                os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def background_steps_back() -> None:
    """Have those of Ray's processes below this one do so that no token passes: the controller, the GCS, their
    helpers."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name() not in _KEPT_NAMES and not " ".join(process.cmdline()).startswith(_KEPT):
                step_back(process.pid)


def _threads(pid: int) -> list[int]:
    """On Linux each thread has a niceness of its own; elsewhere the process has one."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [pid]
