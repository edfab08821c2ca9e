"""A processor for each thread that computes, where a group of ranks has a machine's processors to itself.

The threads of a forward wait for each other hundreds of times an iteration. When something else wakes up, the scheduler
of the operating system may put two of them on one processor, and it takes milliseconds until it looks again: the whole
forward takes twice as long meanwhile. Threads that stay where they are have only what woke up to wait for.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

NAME = "forward"
_TASKS = Path("/proc/self/task")


def name_threads() -> None:
    """Name the calling thread, which those that OpenMP starts from it inherit. To be called before it starts any."""
    with suppress(OSError):  # not on Linux
        Path("/proc/thread-self/comm").write_text(NAME)


def hold_processors(threads: int, rank: int = 0, ranks: int = 1) -> None:
    """Keep the calling thread, which was named, and those of its OpenMP teams (torch and numba may have one each) on a
    processor each: the `threads` of this `rank`, where its group's ranks on this machine take as many as this process
    may run on, and these are more than one. With fewer, other programs or groups may want the same ones.
    """
    if not hasattr(os, "sched_setaffinity") or not _TASKS.is_dir():
        return
    processors = sorted(os.sched_getaffinity(0))
    if not 1 < threads * ranks == len(processors):
        return
    first, *others = processors[rank * threads : (rank + 1) * threads]
    own = threading.get_native_id()
    for index, thread in enumerate(each for each in _named() if each != own):
        with suppress(OSError):  # it may have ended
            os.sched_setaffinity(thread, {others[index % len(others)]} if others else {first})
    os.sched_setaffinity(own, {first})


def _named() -> list[int]:
    """Ids of the threads of that name, in the order in which they were started: one team after another."""
    found = []
    for task in _TASKS.iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().strip() == NAME:
                found.append(int(task.name))
    return sorted(found)
