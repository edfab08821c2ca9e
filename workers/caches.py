"""Where what is made once is kept: models, profiles, compiled kernels."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_dir() -> Path:
    """STALLFREE_CACHE, else stallfree in XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("STALLFREE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stallfree"


def kernels_dir(sources: Path) -> Path:
    """Of kernels whose sources are in this folder. numba knows that one has changed by the file that it is in, and not
    by those that its parts are in: so each state of all of them has a place of its own."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"llvmlite" in text:
            digest.update(path.name.encode() + b"\0" + text)
    return cache_dir() / "kernels" / digest.hexdigest()[:16]
