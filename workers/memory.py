"""The process's own memory."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Have what is free returned to the system, where the allocator is glibc's: loading leaves plenty."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
