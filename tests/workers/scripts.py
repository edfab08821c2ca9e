"""Scripts in processes of their own: what libraries do to a process once is done there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(script: str, *arguments: object) -> str:
    """What it prints; it has to end well."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
