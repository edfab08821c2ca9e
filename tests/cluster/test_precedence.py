"""A process steps back. Which processes of a server do is seen in tests/deploy/test_cli.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from cluster.precedence import NICENESS, step_back


def nicenesses(pid: int) -> set[int]:
    """Of all its threads."""
    if sys.platform != "linux":
        return {psutil.Process(pid).nice()}
    return {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(f"/proc/{pid}/task")}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process with three threads."""
    code = "import threading, time\nfor _ in range(2): threading.Thread(target=time.sleep, args=(60,)).start()\nprint()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_all_threads_of_a_process_step_back_once(sleeper: subprocess.Popen[str]) -> None:
    before = nicenesses(sleeper.pid)
    step_back(sleeper.pid)
    step_back(sleeper.pid)
    assert nicenesses(sleeper.pid) == {max(NICENESS, *before)}


def test_a_process_that_is_gone_is_no_error(sleeper: subprocess.Popen[str]) -> None:
    sleeper.kill()
    sleeper.wait()
    step_back(sleeper.pid)
