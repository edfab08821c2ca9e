"""A thread that starts what takes long, can be interrupted at it, and stays when it is done."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Starter(threading.Thread, Generic[Result]):
    """`outcome` is what `start` returns or raises. Ray asks the kernel to end its processes with their parent, which to
    the kernel is this thread: it is there until `ended`."""

    def __init__(self, start: Callable[[], Result], ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self.outcome: Future[Result] = Future()
        self._start_it, self._ended = start, ended

    def run(self) -> None:
        try:
            self.outcome.set_result(self._start_it())
        except BaseException as error:
            self.outcome.set_exception(error)
        self._ended.wait()

    def interrupt(self, error: type[BaseException], within_s: float) -> None:
        """Raise `error` in what is being started, and wait until it has taken notice."""
        begun = time.monotonic()
        while not self.outcome.done() and time.monotonic() < begun + within_s:
            self._raise(ctypes.py_object(error))
            wait([self.outcome], timeout=0.2)
        if self.outcome.done():
            self._raise(None)  # one that came too late would end the thread

    def _raise(self, error: Any) -> None:
        """The next time that the thread runs Python; with None, nothing that has been asked for."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), error)
