"""Where compiled kernels are kept: by all that they are made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.caches import kernels_dir

KEPT = "import workers.attention.blocks, numba; print(numba.config.CACHE_DIR)"


def test_another_source_of_kernels_is_another_place(tmp_path: Path) -> None:
    sources = tmp_path / "parts"
    sources.mkdir()
    (sources / "parts.py").write_text("import numba\n")
    (sources / "other.py").write_text("x = 1\n")
    before = kernels_dir(tmp_path)
    (sources / "other.py").write_text("x = 2\n")
    assert kernels_dir(tmp_path) == before
    (sources / "parts.py").write_text("import numba\ny = 1\n")
    assert kernels_dir(tmp_path) != before


@pytest.mark.parametrize("own", [False, True])
def test_numba_is_told_and_what_the_operator_says_holds(tmp_path: Path, own: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["STALLFREE_CACHE"] = str(tmp_path)
    if own:
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "own")
    said = subprocess.run([sys.executable, "-c", KEPT], env=environment, capture_output=True, text=True, check=True)
    place = Path(said.stdout.strip())
    assert place == tmp_path / "own" if own else place.parent == tmp_path / "kernels"
