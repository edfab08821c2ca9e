"""A worker computes with the threads it was told to, whatever the libraries it loads do to that number."""

from __future__ import annotations

from pathlib import Path

from tests.workers.scripts import output_of

SCRIPT = """
import sys, torch
from workers.config import WorkerConfig
from workers.worker import Worker
described = Worker(WorkerConfig(model_dir=sys.argv[1], device="cpu", threads=1)).load()
print(described.threads, torch.get_num_threads())
"""


def test_loading_keeps_the_number_of_threads(tiny_model_dir: Path) -> None:
    assert output_of(SCRIPT, tiny_model_dir).split() == ["1", "1"]


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
    without = output_of(WITHOUT_OPENMP, tiny_model_dir).split()
    with_it = "\n".join(line for line in WITHOUT_OPENMP.splitlines() if "omppool" not in line)
    usual = output_of(with_it, tiny_model_dir).split()
    assert without[0] == "workqueue"
    assert len(without) == 6
    assert without[1:] == usual[1:]
