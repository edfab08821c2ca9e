"""A run as one HTML file that needs nothing else, Plotly included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from deploy.bench.figures import Figures
from deploy.bench.kinds import KindFigures
from deploy.bench.plots import Plot, plots
from deploy.bench.record import RunRecord
from deploy.bench.show import COLUMNS, lines, spread_cells

_STYLE = """
:root{--ink:#1b1f24;--soft:#6a737d;--page:#fff;--line:#d0d7de}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#8b949e;--page:#0d1117;--line:#30363d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1040px;margin:2rem auto;
padding:0 1rem}
table{border-collapse:collapse;width:100%;margin:1rem 0}
td,th{padding:.4rem .5rem;border-bottom:1px solid var(--line);text-align:right}td{white-space:nowrap}
td:first-child,th:first-child{text-align:left}p.note{color:var(--soft)}p.warning{color:#cf222e}
div.plot{height:420px;margin:1.5rem 0}
"""


def page(run: RunRecord, found: Figures, skip_s: float = 0.0) -> str:
    about = " · ".join(f"{escape(str(name))}: {escape(_shown(value))}" for name, value in run.facts.items())
    several = len(found.by_kind) > 1
    tables = "\n".join(_table(kind, of) for kind, of in (found.by_kind if several else {"": found}).items())
    said = "\n".join(f"<p>{escape(line)}</p>" for line in lines(found))
    warned = "\n".join(f'<p class="warning">{escape(warning)}</p>' for warning in found.warnings)
    drawn = plots(run, found, skip_s)
    body = f'<p class="note">{about}</p>\n{warned}\n{tables}\n{said}\n{places(len(drawn))}'
    return document("Load test", body, drawn)


def places(count: int, first: int = 0) -> str:
    """Where plots `first` and following of a document are drawn."""
    return "\n".join(f'<div class="plot" id="plot{number}"></div>' for number in range(first, first + count))


def document(title: str, body: str, drawn: Sequence[Plot]) -> str:
    """A page with its title above the body (HTML), in which the plots find their `places`."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        f"<script>{get_plotlyjs()}</script></head><body>\n<h1>{escape(title)}</h1>\n{body}\n"
        f"<script>{_safe(drawn)}.forEach((plot, number) => Plotly.newPlot("
        '"plot" + number, plot.data, plot.layout, {responsive: true, displaylogo: false}));</script>\n</body></html>\n'
    )


def _table(kind: str, figures: KindFigures) -> str:
    rows = [(name.upper(), *spread_cells(getattr(figures, name))) for name in ("ttft", "tpot", "itl", "e2e")]
    return table((kind or "time", *COLUMNS), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts, escaped; the first of each row is its name."""
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    others = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{first}</tr></thead><tbody>\n{others}</tbody></table>"


def _safe(content: object) -> str:
    """JSON that ends no script element, whatever a server wrote into it."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
