"""What a command started ends with it, whatever the command does when it is asked to end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from deploy.lifetime import Lifetime, Stopped
from deploy.starter import Starter

BEGIN = """
import subprocess, sys, threading, time
from deploy import lifetime
lifetime.CLOSE_SECONDS = 0.5
with lifetime.Lifetime() as life:
    # A grandchild whose parent has gone, as Ray's processes are when their starter is killed.
    grandchild = "from subprocess import *; print(Popen(['sleep', '600'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    pid = subprocess.run([sys.executable, "-c", grandchild], capture_output=True, text=True).stdout.strip()
    (life.directory / "socket").touch()
    say = lambda: print(pid, life.directory, flush=True)
"""


def run(body: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process in that body, the orphan below it, and its directory."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    process = subprocess.Popen([sys.executable, "-c", BEGIN + indented], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, directory = process.stdout.readline().split()
    return process, int(pid), Path(directory)


@pytest.mark.parametrize(
    "body",
    [
        "say(); life.wait()",
        "life.run(lambda: (say(), time.sleep(600)))",
        "life.on_close(lambda: time.sleep(600)); say(); life.wait()",
        "life.on_close(lambda: 1 / 0); say(); life.wait()",
        "try:\n    say(); life.wait()\nexcept BaseException:\n    time.sleep(600)",
    ],
    ids=["waiting", "starting", "a step that hangs", "a step that fails", "a library that swallows the signal"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it(body: str, number: int) -> None:
    process, orphan, directory = run(body)
    assert psutil.pid_exists(orphan)
    os.kill(process.pid, number)
    assert process.wait(30) == 0
    assert not psutil.pid_exists(orphan)
    assert not directory.exists()


def test_an_error_ends_all_of_it_and_is_not_swallowed() -> None:
    process, orphan, directory = run("say(); life.run(lambda: 1 / 0)")
    assert process.wait(30) == 1
    assert not psutil.pid_exists(orphan)
    assert not directory.exists()


def test_steps_run_last_in_first_out() -> None:
    process, _, _ = run("for n in range(3): life.on_close(lambda n=n: print(n, flush=True))\nsay(); life.wait()")
    process.terminate()
    assert process.communicate(timeout=30)[0].split() == ["2", "1", "0"]


def test_a_second_signal_does_not_wait_for_running_work() -> None:
    process, orphan, _ = run("life.extra_seconds = 600\nlife.on_close(lambda: time.sleep(600))\nsay(); life.wait()")
    process.terminate()
    time.sleep(1.5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 0
    assert not psutil.pid_exists(orphan)


def test_what_was_there_before_is_left_alone() -> None:
    """A process that has children of its own, a Ray among them perhaps, and then runs a command in itself."""
    with subprocess.Popen(["sleep", "600"]) as before:
        try:
            with Lifetime() as life, suppress(ZeroDivisionError):
                with_it = life.run(lambda: subprocess.Popen(["sleep", "600"]))
                life.run(lambda: 1 / 0)
            assert not psutil.pid_exists(with_it.pid)
            assert before.poll() is None
        finally:
            before.kill()


def test_what_is_just_being_started_goes_no_further_before_anything_is_closed() -> None:
    """A library may wait for its child in C, holding the interpreter: half a minute if that child were killed first."""
    process, _, _ = run(
        """
def start():
    say()
    try:
        while True:
            time.sleep(0.01)
    finally:
        print("interrupted", flush=True)

life.on_close(lambda: print("closed", flush=True))
life.run(start)
"""
    )
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.read().split() == ["interrupted", "closed"]
    assert process.wait(30) == 0


def test_an_interruption_that_comes_too_late_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that it has started would end with it, before anything is closed."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    ended = threading.Event()
    starter = Starter(lambda: 7, ended)
    starter.start()
    assert starter.outcome.result(10) == 7
    time.sleep(0.1)  # it waits now
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(starter.ident or 0), ctypes.py_object(Stopped))
    starter.interrupt(Stopped, 1.0)
    assert starter.is_alive()
    ended.set()
    starter.join(10)
    assert not raised


TRACED = """
import sys, threading, time
from deploy.starter import Starter

def start():
    while True:
        time.sleep(0.01)

starter = Starter(start, threading.Event())
starter.start()
starter.interrupt(KeyboardInterrupt, 10)
assert starter.outcome.done()
sys.settrace(lambda *seen: None)
(lambda: None)()
"""


def test_who_was_interrupted_can_be_traced() -> None:
    """As debuggers and coverage do: what an interruption leaves behind made CPython 3.11 stand still there."""
    subprocess.run([sys.executable, "-c", TRACED], timeout=60, check=True)
