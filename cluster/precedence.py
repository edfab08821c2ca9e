"""Which processes of a machine wait for which, where ranks compute on its processors.

A forward on several threads is hundreds of short parallel regions, at the end of which each thread waits for all
others. Whatever interrupts one of them interrupts the whole forward: the tokens of an iteration, on their way through
scheduler and front ends to the clients, make the next one longer by as much processor time as they take. Where those
step back, that time comes out of what the forward leaves: between its iterations, and where it has one thread only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

NICENESS = 15
"""What Ray gives all workers by default. With 19 an iteration is a little shorter still, but beside busy programs of
other people's, which are at 0, the scheduler gets so little that iterations wait for it; with 15 they do not."""

RANKS = "ray::RankActor"
_UNTAKEN = "ray::IDLE"
_RAYLET = "raylet"


def step_back(pid: int | None = None) -> None:
    """Have a process (this one by default), in all its threads, give way to those that compute. Threads that it starts
    later, and processes, take that after the thread that starts them. One that has
    stepped back further stays there."""
    pid = os.getpid() if pid is None else pid
    with suppress(OSError):  # it may have ended
        for thread in _threads(pid):
            if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
                os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def rays_step_back() -> None:
    """Have Ray's own processes below this one do so: the proxy, the controller, their helpers. Not the raylet, whose
    children the ranks are, nor a worker that may become one."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name() != _RAYLET and not " ".join(process.cmdline()).startswith((RANKS, _UNTAKEN)):
                step_back(process.pid)


def _threads(pid: int) -> list[int]:
    """On Linux each thread has a niceness of its own; elsewhere the process has one."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [pid]
