"""The progress bar of a run, on standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from deploy.bench.monitor import Progress

_STAGES = {"detect": "asking the server", "prepare": "preparing", "warm-up": "warming up", "run": "running"}


class ProgressBar:
    """A context manager; `update` is what `drive` calls, `say` prints a line above it. Without a terminal on standard
    error there is no bar, and lines alone. `title` says which of several runs it is."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} ended  {task.fields[now]}"),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        self.title = ""
        self._console = console
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(_STAGES["detect"], total=0, now="")

    def update(self, progress: Progress) -> None:
        now = f"{progress.running} running  {progress.tokens:,} tokens" if progress.stage == "run" else ""
        if progress.failed:
            now += f"  {progress.failed} failed"
        self._bar.update(
            self._task,
            description=f"{self.title}: {_STAGES[progress.stage]}" if self.title else _STAGES[progress.stage],
            total=progress.planned,
            completed=progress.finished + progress.failed,
            now=now,
        )

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
