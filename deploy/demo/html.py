"""The demonstration as one HTML file that needs nothing else: timelines as inline SVG, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from deploy.demo.record import PhaseRecord, StreamRecord
from deploy.demo.table import COLUMNS, cells, seconds, verdict

_LEFT, _RIGHT, _ROW, _WIDTH = 90, 20, 22, 1000
_STALL = 8
"""Gaps longer than this many of the median gap are shaded."""

_STYLE = """
:root{--ink:#1b1f24;--soft:#6a737d;--page:#fff;--token:#1f6feb;--long:#8250df;--stall:#ffd8d3;--line:#d0d7de}
@media(prefers-color-scheme:dark){
:root{--ink:#e6edf3;--soft:#8b949e;--page:#0d1117;--token:#58a6ff;--long:#bc8cff;--stall:#5a1e1e;--line:#30363d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1040px;margin:2rem auto;
padding:0 1rem}
svg{width:100%;height:auto}text{font-size:12px;fill:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{padding:.4rem .7rem;border-bottom:1px solid var(--line);
text-align:right}
td:first-child,th:first-child{text-align:left}p.note{color:var(--soft)}
"""


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
        f'<p class="note">Each line is one token. Shaded: a gap of more than {_STALL} times the median. '
        f"The bar of the long prompt is the time to its first token.</p>\n</body></html>\n"
    )


def _table(phases: list[PhaseRecord]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(phase)) + "</tr>\n" for phase in phases
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def _svg(phase: PhaseRecord, span: float) -> str:
    height = _ROW * (len(phase.streams) + 1) + 24
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(phase.title)}">']
    for number, stream in enumerate(phase.streams):
        parts += _stream(stream, f"stream {number + 1}", _ROW * number, span)
    parts += _long(phase.long, f"{phase.long_tokens:,} tokens", _ROW * len(phase.streams), span)
    parts += _axis(span, height - 22)
    return "\n".join([*parts, "</svg>"])


def _x(time: float, span: float) -> float:
    return round(_LEFT + time / span * (_WIDTH - _LEFT - _RIGHT), 1)


def _stream(stream: StreamRecord, label: str, top: int, span: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + 15}">{label}</text>'
    lengths = sorted(end - start for start, end in stream.gaps)
    threshold = _STALL * lengths[len(lengths) // 2] if lengths else 0
    for start, end in stream.gaps:
        if end - start > threshold:
            yield (
                f'<rect x="{_x(start, span)}" y="{top + 3}" width="{_x(end, span) - _x(start, span):.1f}" height="16" '
                f'fill="var(--stall)"><title>{seconds(end - start)}</title></rect>'
            )
    yield _ticks(stream, top, span, "--token")


def _long(stream: StreamRecord, label: str, top: int, span: float) -> Iterator[str]:
    left, right = _x(stream.sent, span), _x(stream.tokens[0], span)
    yield f'<text x="0" y="{top + 15}">{label}</text>'
    yield (
        f'<rect x="{left}" y="{top + 6}" width="{right - left:.1f}" height="10" fill="var(--long)" opacity=".35">'
        f"<title>{seconds(stream.ttft)} to its first token</title></rect>"
    )
    yield _ticks(stream, top, span, "--long")


def _ticks(stream: StreamRecord, top: int, span: float, colour: str) -> str:
    path = "".join(f"M{_x(token, span)} {top + 3}v16" for token in stream.tokens)
    return f'<path d="{path}" stroke="var({colour})" stroke-width="1.2" fill="none"/>'


def _axis(span: float, top: int) -> Iterator[str]:
    yield f'<path d="M{_LEFT} {top}H{_WIDTH - _RIGHT}" stroke="var(--line)"/>'
    every = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if span / step <= 15 or step == 1000)
    for count in range(int(span / every) + 1):
        yield f'<text x="{_x(count * every, span)}" y="{top + 16}" text-anchor="middle">{count * every:g} s</text>'
