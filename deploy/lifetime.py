"""The life of one command that starts other processes: whatever ends it, all that it started ends too, in time.

Ray's processes outlive a parent that dies while it starts them, and a signal may come at any moment. So this process
adopts every orphan below it (Linux), closes in an orderly way as long as time is left, and then kills what remains.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from cluster.short_paths import short_directory
from deploy.starter import Result, Starter

CLOSE_SECONDS = 6.0
"""For the orderly part of closing, draining aside. Killing what is left after it takes a second at most."""

INTERRUPT_SECONDS = 3.0
"""Of those, for what is just being started to take notice."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SWEEPS = 5
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST = 20  # of the 107 bytes that a socket's path may have, Ray needs some 80


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. Everything that lets Ctrl-C through lets it through."""


class Lifetime:
    """`with Lifetime() as life:` raises Stopped inside on SIGINT or SIGTERM and swallows it on the way out.

    What takes long to start is started by `life.run`, on another thread: then this one hears a signal at once, whatever
    a library waits for. `life.on_close(step)` steps run last in, first out.
    `directory` is removed at the end; it is short, because sockets live in it. `extra_seconds` may be raised to let
    running work finish first.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="stallfree-", dir=short_directory(_LONGEST)))
        self.stopped = threading.Event()
        self.extra_seconds = 0.0
        self._closing = False
        self._ended = threading.Event()
        self._starter: Starter[Any] | None = None
        self._steps: list[Callable[[], object]] = []
        self._traces: list[Callable[[set[int]], object]] = []
        self._seen: set[int] = set()
        self._before = {child.pid for child in psutil.Process().children()}

    def __enter__(self) -> Lifetime:
        _adopt_orphans()
        self._handlers = [(number, signal.getsignal(number)) for number in _SIGNALS]
        self._listen()
        return self

    def _listen(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._stop)

    def run(self, start: Callable[[], Result]) -> Result:
        """What `start` returns or raises, unless a signal comes first."""
        self._starter = starter = Starter(start, self._ended)
        starter.start()
        while not starter.outcome.done():
            wait([starter.outcome], timeout=0.05)  # in steps: signal handlers run between them
            self._listen()  # again and again: Ray's core takes SIGTERM over when it starts, and would abort on it
        return starter.outcome.result()

    def on_close(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def on_ended(self, remove: Callable[[set[int]], object]) -> None:
        """Called last, with the ids of all processes that were below this one: for what they leave under their ids."""
        self._traces.append(remove)

    def finish(self) -> None:
        """From here on a signal interrupts nothing any more: what is left to be done is short, and is to be done."""
        self._closing = True

    def wait(self) -> None:
        """Until a signal comes."""
        while not self.stopped.wait(0.5):
            pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._closing = True
        self._look()
        closer = threading.Thread(target=self._close, daemon=True)
        closer.start()
        begun = time.monotonic()
        while closer.is_alive() and time.monotonic() < begun + CLOSE_SECONDS + self.extra_seconds:
            closer.join(0.05)  # in steps: a second signal shortens the time
        self._sweep()
        self._ended.set()
        for number, handler in self._handlers:
            signal.signal(number, handler)
        return isinstance(error, Stopped)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped.is_set():  # asked twice: whoever asks does not want to wait for running work
            self.extra_seconds = 0.0
            return
        self.stopped.set()
        threading.Thread(target=self._end_by_force, daemon=True).start()
        if not self._closing:
            raise Stopped

    def _close(self) -> None:
        if self._starter is not None:
            # Ray waits for a process that it has begun in a way that keeps every thread of this one from running: were
            # that process killed first, this one would stand still for half a minute.
            self._starter.interrupt(Stopped, INTERRUPT_SECONDS)
        for step in reversed(self._steps):
            with suppress(Exception):
                step()

    def _end_by_force(self) -> None:
        """For a main thread that a signal does not reach: one that waits inside a library, or swallows it there."""
        asked = time.monotonic()
        while time.monotonic() < asked + CLOSE_SECONDS + self.extra_seconds + 1:
            time.sleep(0.1)
        self._sweep()
        sys.stderr.flush()
        os._exit(0)

    def _sweep(self) -> None:
        for _ in range(_SWEEPS):  # what is being ended may just have started something
            if not (below := self._look()):
                break
            end_processes(below)
        shutil.rmtree(self.directory, ignore_errors=True)
        for remove in self._traces:
            with suppress(OSError):
                remove(self._seen)

    def _look(self) -> list[psutil.Process]:
        """Processes below this one, but for those that were there before and what is below them."""
        own = [child for child in psutil.Process().children() if child.pid not in self._before]
        below = list(own)
        for child in own:
            with suppress(psutil.Error):
                below += child.children(recursive=True)
        self._seen.update(process.pid for process in below)
        return below


def end_processes(processes: list[psutil.Process], grace_s: float = 0.5) -> None:
    """Ask these processes to end, and kill those that do not."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=grace_s)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be found. Only Linux has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
