"""When a request came, as the process knows it that clients are connected to: what it waits on its way from there to
who answers it counts, too.

A client that names a time of its own asks for its answer sooner, no more than it may with a promise.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-stallfree-received"
LONGEST_S = 10.0
"""Of a way that is believed."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@cache
def _machine() -> str:
    """Whose processes share a clock that never goes back. Between two machines nobody knows how far clocks differ, and
    seconds of that would be taken from every promise."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


class Arrival:
    """ASGI middleware that notes the machine and its time in each request, in the place of what is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = HEADER.encode()
            others = [header for header in scope["headers"] if header[0].lower() != name]
            scope = {**scope, "headers": [*others, (name, f"{_machine()} {time.monotonic():.6f}".encode())]}
        await self._app(scope, receive, send)


def seconds_on_its_way(headers: Mapping[str, str]) -> float:
    """Since the time that was noted; 0 where there is none, none of this machine's, or none to be believed."""
    machine, _, noted = headers.get(HEADER, "").rpartition(" ")
    if machine != _machine():
        return 0.0
    try:
        seconds = time.monotonic() - float(noted)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds <= LONGEST_S else 0.0
