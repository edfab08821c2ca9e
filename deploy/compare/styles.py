"""How each configuration is drawn: in the same colour on every plot, and in none that another one has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deploy.compare.configuration import Configuration

HUES: dict[str, tuple[str, ...]] = {
    "alternate": ("#8a6d3b",),
    "whole": ("#cf222e",),
    "chunked": ("#12a5b0", "#1f6feb", "#6639ba", "#d6409f"),
    "slo": ("#2da44e",),
    "separated": ("#f0a000", "#bc4c00"),
}
"""By kind; all of them can be seen on a white page and on a black one."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def styles(configurations: Sequence[Configuration]) -> dict[str, dict[str, str]]:
    """By name, what Plotly calls a line's colour and dash. Those of one kind have its hues by turns, then dashes."""
    found: dict[str, dict[str, str]] = {}
    drawn: Counter[str] = Counter()
    for configuration in configurations:
        hues, before = HUES[configuration.kind], drawn[configuration.kind]
        dash = DASHES[before // len(hues) % len(DASHES)]
        found[configuration.name] = {"color": hues[before % len(hues)], "dash": dash}
        drawn[configuration.kind] += 1
    return found
