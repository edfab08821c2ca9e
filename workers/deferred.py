"""A module that is imported once something of it is asked for."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

META_KERNELS = "torch._meta_registrations"
"""What torch's tracing knows of its operators' shapes, with Python versions of hundreds of them: torch imports it for
what it registers, and a rank that computes on a processor never asks for it. 18 MiB, and a fifth of torch's import."""


def defer(name: str) -> None:
    """Whoever imports `name` from now on gets a placeholder, and the module itself by the first question. For those who
    use it nothing changes, nor where it is there already, or where there is none of that name."""
    if name in sys.modules:
        return
    placeholder = ModuleType(name, "Not imported yet.")

    def loaded(attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system's own questions, which every module is asked
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    placeholder.__getattr__ = loaded  # type: ignore[method-assign]
    sys.modules[name] = placeholder
