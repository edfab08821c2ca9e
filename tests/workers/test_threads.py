"""A worker computes with the threads it was told to, whatever the libraries it loads do to that number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from workers.config import WorkerConfig
from workers.worker import Worker
described = Worker(WorkerConfig(model_dir=sys.argv[1], device="cpu", threads=1)).load()
print(described.threads, torch.get_num_threads())
"""


def run(script: str, folder: Path) -> list[str]:
    """The words it prints. In a process of its own: the libraries do what they do to one once."""
    command = [sys.executable, "-c", script, str(folder)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split()


def test_loading_keeps_the_number_of_threads(tiny_model_dir: Path) -> None:
    assert run(SCRIPT, tiny_model_dir) == ["1", "1"]


WITHOUT_OPENMP = """
import sys
sys.modules["numba.np.ufunc.omppool"] = None  # as where the system has no libgomp
import numba
from pathlib import Path
from tests.workers.driver import Driver, loaded
driver = Driver(loaded(Path(sys.argv[1]), 64, device="cpu"))
driver.admit(0, range(5, 45))
driver.step({0: 40})
for _ in range(4):
    driver.step({0: 1})
print(numba.threading_layer(), *driver.tokens[0][40:])
"""


def test_without_openmp_the_same_tokens_come_of_another_queue(tiny_model_dir: Path) -> None:
    without = run(WITHOUT_OPENMP, tiny_model_dir)
    usual = run("\n".join(line for line in WITHOUT_OPENMP.splitlines() if "omppool" not in line), tiny_model_dir)
    assert without[0] == "workqueue"
    assert len(without) == 6
    assert without[1:] == usual[1:]
