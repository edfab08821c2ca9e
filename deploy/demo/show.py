"""The phases on a terminal: their timelines one under the other on one axis, the table, and a sentence."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.demo.record import PhaseRecord
from deploy.demo.table import COLUMNS, cells, verdict
from deploy.demo.timeline import ASCII, UNICODE, Glyphs, Row, timeline

_LABEL = 14
_WIDEST = 160


def show(console: Console, phases: list[PhaseRecord]) -> None:
    """Plain ASCII where the output is no terminal, or one that cannot show more."""
    glyphs = UNICODE if console.is_terminal and "utf" in console.encoding.lower() else ASCII
    width = max(20, min(console.width, _WIDEST) - _LABEL - 2)
    span = max(phase.end for phase in phases)
    for phase in phases:
        console.print(Text(f"\n{phase.title}", style="bold"))
        for row in timeline(phase, width, span, glyphs):
            console.print(_styled(row, glyphs), soft_wrap=True)
    console.print(Text(_legend(glyphs), style="dim"))
    console.print(_table(phases, glyphs))
    console.print(Text(verdict(phases)))


def _styled(row: Row, glyphs: Glyphs) -> Text:
    line = Text(f"{row.label:>{_LABEL}} ", style="dim" if not row.label else "")
    for mark, run in groupby(row.cells, key=lambda cell: _style(cell, glyphs) if row.label else ""):
        line.append("".join(run), style=mark)
    return line


def _style(cell: str, glyphs: Glyphs) -> str:
    if cell == glyphs.stall:
        return "bold red"
    return "green" if cell in glyphs.levels else "yellow"


def _legend(glyphs: Glyphs) -> str:
    return (
        f"{glyphs.levels[0]}{glyphs.levels[-1]} slow and fast streaming   {glyphs.stall} stalled   "
        f"{glyphs.waiting} waiting for the first token\n"
    )


def _table(phases: list[PhaseRecord], glyphs: Glyphs) -> Table:
    table = Table(box=box.ROUNDED if glyphs is UNICODE else box.ASCII)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for phase in phases:
        table.add_row(*cells(phase))
    return table
