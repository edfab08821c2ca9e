"""A worker process whose raylet is gone: Ray has it wait for the calls it is in before it ends, and some of ours never
return. It would keep its memory, of a GPU too, for ever."""

from __future__ import annotations

import os
import threading
import time

import psutil

LOOK_EVERY_S = 1.0


def end_with_raylet() -> None:
    """Have this process end as soon as its raylet has; nothing where no raylet started it."""
    parent = os.getppid()
    if psutil.Process(parent).name() == "raylet":
        threading.Thread(target=_end_with, args=(parent,), daemon=True, name="raylet-watch").start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os._exit(1)
