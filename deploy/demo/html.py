"""The demonstration as one HTML file that needs nothing else: timelines as inline SVG, and the table."""

from __future__ import annotations

from html import escape

from deploy.demo.picture import COLOURS, ROW, STALL, WIDTH, axis, long_row, stream_row
from deploy.demo.record import PhaseRecord
from deploy.demo.table import COLUMNS, cells, verdict

_STYLE = (
    COLOURS
    + """\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1040px;margin:2rem auto;
padding:0 1rem}
svg{width:100%;height:auto}text{font-size:12px;fill:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{padding:.4rem .7rem;border-bottom:1px solid var(--line);
text-align:right}
td:first-child,th:first-child{text-align:left}p.note{color:var(--soft)}
"""
)


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A long prompt into running streams</title>
<meta name="viewport" content="width=device-width">
"""


def report(phases: list[PhaseRecord], facts: dict[str, str]) -> str:
    """The page. `facts` (model, device, ...) are shown under its title."""
    span = max(phase.end for phase in phases)
    about = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in facts.items())
    figures = "\n".join(f"<h2>{escape(phase.title)}</h2>\n{_svg(phase, span)}" for phase in phases)
    return (
        f"{_HEAD}<style>{_STYLE}</style></head><body>\n"
        f"<h1>A long prompt into running streams</h1>\n<p>{escape(verdict(phases))}</p>\n"
        f'<p class="note">{about}</p>\n{_table(phases)}\n{figures}\n'
        f'<p class="note">Each line is one token. Shaded: a gap of more than {STALL} times the median. '
        f"The bar of the long prompt is the time to its first token.</p>\n</body></html>\n"
    )


def _table(phases: list[PhaseRecord]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(phase)) + "</tr>\n" for phase in phases
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def _svg(phase: PhaseRecord, span: float) -> str:
    height = ROW * (len(phase.streams) + 1) + 24
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(phase.title)}">']
    for number, stream in enumerate(phase.streams):
        parts += stream_row(stream, f"stream {number + 1}", ROW * number, span)
    parts += long_row(phase.long, f"{phase.long_tokens:,} tokens", ROW * len(phase.streams), span)
    parts += axis(span, height - 22)
    return "\n".join([*parts, "</svg>"])
