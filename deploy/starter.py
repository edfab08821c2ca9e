"""A thread that starts what takes long, can be interrupted at it, and stays when it is done."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

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
            _raise_in(self.ident, error)
            wait([self.outcome], timeout=0.2)
        if self.outcome.done():
            _raise_in(self.ident, None)  # one that came too late would end the thread
            _look_no_more()


class _Found(BaseException):
    pass


def _look_no_more() -> None:
    """Every thread looks for such an error until one is found, and one that was taken back never is: all of them would
    look for ever, and CPython 3.11 would not get on where it is traced. So this one finds one."""
    try:
        _raise_in(threading.get_ident(), _Found)
        while True:
            pass
    except _Found:
        pass


def _raise_in(thread: int | None, error: type[BaseException] | None) -> None:
    """The next time that the thread runs Python; with None, nothing that has been asked for."""
    asked = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), asked)
