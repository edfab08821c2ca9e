"""A node that dies: its ranks are started again where the cluster has room, and streams only pause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["actor", "compiled"])
def test_a_killed_raylet_takes_its_ranks_along_and_streams_go_on_elsewhere(
    tiny_model_dir: Path, transport: str
) -> None:
    """A raylet also holds the shared memory of a compiled graph's channels on its node."""
    program = [sys.executable, "-m", "tests.cluster.nodes", str(tiny_model_dir), transport]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr[-3000:]
    print(ran.stdout)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["transport"] == transport
    assert told["differ"] == 0
    assert told["killed_raylets"] == 1
    assert told["new_ranks"]
    assert told["elsewhere"]
    assert told["blocks"] == [2500, 2500]
    if told["scheduler_moved"]:  # Ray places it anywhere, here on the same node
        assert told["incidents"] == ["the scheduler died and was started again"]
    else:
        assert len([line for line in told["incidents"] if "died" in line]) == 1, told["incidents"]
