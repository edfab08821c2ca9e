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


def test_loading_keeps_the_number_of_threads(tiny_model_dir: Path) -> None:
    """In a process of its own: the libraries do what they do to it once a process."""
    command = [sys.executable, "-c", SCRIPT, str(tiny_model_dir)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert ran.stdout.split() == ["1", "1"], ran.stderr[-2000:]
