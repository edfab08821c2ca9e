"""Directories for sockets, whose paths may have no more than some hundred bytes."""

from __future__ import annotations

import os
import tempfile


def short_directory(longest: int) -> str:
    """Where temporary files go, unless its path has more than `longest` bytes and leaves what is below it too few."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > longest and os.access("/tmp", os.W_OK) else usual
