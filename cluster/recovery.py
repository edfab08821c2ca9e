"""Lost workers, as the iteration loop sees them: how it hears of it, and who gives it new ones. No Ray here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from cluster.executor import Executor

HANG_FACTOR = 10.0
"""An iteration may take so many times what was predicted, beyond the floor, before its workers are taken for hung."""


class WorkersLost(Exception):
    """The workers of a group cannot go on: `str()` says why in one line. `hung`: they are there, and do not answer."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Recovery(Protocol):
    """Who replaces the workers of a loop."""

    def patience(self, predicted_s: float | None) -> float:
        """Seconds after which an iteration that was expected to take `predicted_s` is not waited for any more."""

    def watch(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called when a worker dies, also while it has nothing to do."""

    def dead(self) -> WorkersLost | None:
        """Why these workers will never answer again, where that is known."""

    async def replace(self, lost: WorkersLost) -> Executor:
        """Workers that know nothing in place of those lost. Raises WorkersLost where there will be none."""


def patience(hang_seconds: float, predicted_s: float | None) -> float:
    """Seconds: the floor `hang_seconds`, and `HANG_FACTOR` times the prediction; where there is none, the floor's."""
    return hang_seconds + HANG_FACTOR * (hang_seconds if predicted_s is None else predicted_s)


def in_words(error: BaseException) -> str:
    """An exception in one line: its name and the last line of its text, which of a nested traceback is the cause."""
    if isinstance(error, WorkersLost):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def hear(answer: asyncio.Future[Any]) -> None:
    """What becomes of an answer that nobody waits for any more is no news, or told elsewhere."""
    if not answer.cancelled():
        answer.exception()
