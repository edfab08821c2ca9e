"""Progress of long file work, on standard error: bars on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Called as report(stage, done, total), both in bytes; total 0 where it is not known. A stage ends at done == total."""


class Bars:
    """A Report that draws. A context manager, so that the terminal is left as it was found."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._quarters: dict[str, int] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._console.is_terminal:
            self._draw(stage, done, total)
        else:
            self._say(stage, done, total)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _say(self, stage: str, done: int, total: int) -> None:
        """One line a quarter: a log of a build should not fill with bars."""
        quarter = 4 * done // total if total else 0
        if quarter > self._quarters.get(stage, -1):
            self._quarters[stage] = quarter
            amount = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else "started"
            print(f"{stage}: {amount}", file=sys.stderr, flush=True)
