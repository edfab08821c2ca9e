"""A processor for each thread that computes, where a rank has a machine's processors to itself.

The threads of a forward wait for each other hundreds of times an iteration. When something else wakes up, the scheduler
of the operating system may put two of them on one processor, and it takes milliseconds until it looks again: the whole
forward takes twice as long meanwhile. Threads that stay where they are have only what woke up to wait for.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NAME = "forward"
_TASKS = Path("/proc/self/task")


def name_threads() -> None:
    """Name the calling thread, which those that OpenMP starts from it inherit. To be called before it starts any."""
    with suppress(OSError):  # not on Linux
        Path("/proc/thread-self/comm").write_text(NAME)


def hold_processors(threads: int) -> bool:
    """Keep the calling thread, which was named, and those of its OpenMP teams (torch and numba may have one each) on a
    processor each. Only where `threads` is the number of processors that this process may run on, and there are more
    than one: with fewer, other ranks or programs may want the same ones. Returns whether it was done.
    """
    if not hasattr(os, "sched_setaffinity") or not _TASKS.is_dir():
        return False
    processors = sorted(os.sched_getaffinity(0))
    if not 1 < threads == len(processors):
        return False
    first, *others = processors
    team = [thread for thread in _named() if thread != _own_id()]
    for index, thread in enumerate(team):
        with suppress(OSError):  # it may have ended
            os.sched_setaffinity(thread, {others[index % len(others)]})
    os.sched_setaffinity(0, {first})
    return bool(team)


def _own_id() -> int:
    return int(Path("/proc/thread-self").resolve().name)


def _named() -> list[int]:
    """Ids of the threads of that name, in the order in which they were started: one team after another."""
    found = []
    for task in _TASKS.iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().strip() == NAME:
                found.append(int(task.name))
    return sorted(found)
