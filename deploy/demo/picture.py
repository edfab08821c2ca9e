"""Streams as pictures: a row for each, a mark for each token, stalls shaded. Pieces of SVG, put together by others."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.demo.record import StreamRecord
from deploy.demo.table import seconds

LEFT, RIGHT, ROW, WIDTH = 90, 20, 22, 1000
STALL = 8
"""Gaps longer than this many of the median gap are shaded."""

LIGHT = "--ink:#1b1f24;--soft:#6a737d;--page:#fff;--token:#1f6feb;--long:#8250df;--stall:#ffd8d3;--line:#d0d7de"
DARK = "--ink:#e6edf3;--soft:#8b949e;--page:#0d1117;--token:#58a6ff;--long:#bc8cff;--stall:#5a1e1e;--line:#30363d"
COLOURS = f"""
:root{{{LIGHT}}}
@media(prefers-color-scheme:dark){{
:root{{{DARK}}}}}
"""


def x_of(time: float, span: float) -> float:
    return round(LEFT + time / span * (WIDTH - LEFT - RIGHT), 1)


def stream_row(stream: StreamRecord, label: str, top: int, span: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + 15}">{label}</text>'
    lengths = sorted(end - start for start, end in stream.gaps)
    threshold = STALL * lengths[len(lengths) // 2] if lengths else 0
    for start, end in stream.gaps:
        if end - start > threshold:
            width = x_of(end, span) - x_of(start, span)
            yield (
                f'<rect x="{x_of(start, span)}" y="{top + 3}" width="{width:.1f}" height="16" '
                f'fill="var(--stall)"><title>{seconds(end - start)}</title></rect>'
            )
    yield _ticks(stream, top, span, "--token")


def long_row(stream: StreamRecord, label: str, top: int, span: float) -> Iterator[str]:
    left, right = x_of(stream.sent, span), x_of(stream.tokens[0], span)
    yield f'<text x="0" y="{top + 15}">{label}</text>'
    yield (
        f'<rect x="{left}" y="{top + 6}" width="{right - left:.1f}" height="10" fill="var(--long)" opacity=".35">'
        f"<title>{seconds(stream.ttft)} to its first token</title></rect>"
    )
    yield _ticks(stream, top, span, "--long")


def _ticks(stream: StreamRecord, top: int, span: float, colour: str) -> str:
    path = "".join(f"M{x_of(token, span)} {top + 3}v16" for token in stream.tokens)
    return f'<path d="{path}" stroke="var({colour})" stroke-width="1.2" fill="none"/>'


def axis(span: float, top: int) -> Iterator[str]:
    yield f'<path d="M{LEFT} {top}H{WIDTH - RIGHT}" stroke="var(--line)"/>'
    every = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if span / step <= 15 or step == 1000)
    for count in range(int(span / every) + 1):
        yield f'<text x="{x_of(count * every, span)}" y="{top + 16}" text-anchor="middle">{count * every:g} s</text>'
