"""A comparison on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.compare.comparison import Comparison
from deploy.compare.report import TABLES, loads_of, notes, warnings
from deploy.compare.verdict import verdict


def show(console: Console, found: Comparison) -> None:
    for name, runs in loads_of(found):
        for columns, cells in TABLES if runs else ():
            table = Table(title=name or None, box=box.SIMPLE, pad_edge=False)
            for number, column in enumerate(columns):
                table.add_column(column, justify="right" if number else "left")
            for compared, run in runs:
                table.add_row(*cells(compared, run))
            console.print(table)
    for note in notes(found):
        console.print(note, highlight=False, markup=False)
    for warning in warnings(found):
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)
    console.print(verdict(found), style="bold", highlight=False, markup=False)
