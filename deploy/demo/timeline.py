"""A phase as a picture of characters: one row a stream, time from left to right, the height of a mark its speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.demo.record import PhaseRecord, StreamRecord

STALL_SHARE = 1 / 16
"""A stretch that is slower than this share of full speed is drawn as a stall."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """`levels` from slow to fast; `waiting` until the first token; `stall` between two tokens far apart."""

    levels: str
    waiting: str
    stall: str
    line: str
    tick: str


UNICODE = Glyphs(levels="▁▂▃▄▅▆▇█", waiting="░", stall="·", line="─", tick="┬")
ASCII = Glyphs(levels="_-=+*#", waiting="~", stall=".", line="-", tick="+")


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    cells: str


def timeline(phase: PhaseRecord, width: int, span: float, glyphs: Glyphs = UNICODE) -> list[Row]:
    """Rows of `width` cells for `span` seconds: the streams, the long request, the axis and its numbers.

    The span is given, so that phases drawn under each other share one axis.
    """
    full_speed = 1 / max(1e-9, min(_quick_gap(stream) for stream in phase.streams))
    rows = [
        Row(f"stream {number}", _cells(stream, width, span, full_speed, glyphs))
        for number, stream in enumerate(phase.streams, 1)
    ]
    rows.append(Row(f"{phase.long_tokens:,} tokens", _cells(phase.long, width, span, full_speed, glyphs)))
    return [*rows, *_axis(width, span, glyphs)]


def _quick_gap(stream: StreamRecord) -> float:
    """A gap of the undisturbed kind: the lower quartile, since a long prompt may slow more than half of them."""
    gaps = sorted(end - start for start, end in stream.gaps)
    return gaps[len(gaps) // 4] if gaps else math.inf


def _cells(stream: StreamRecord, width: int, span: float, full_speed: float, glyphs: Glyphs) -> str:
    step = span / width
    cells = []
    for column in range(width):
        start, end = column * step, (column + 1) * step
        if end <= stream.sent or start > stream.tokens[-1]:
            cells.append(" ")
        elif end <= stream.tokens[0]:
            cells.append(glyphs.waiting)
        else:
            cells.append(_mark(_speed(stream, start, end) / full_speed, glyphs))
    return "".join(cells)


def _speed(stream: StreamRecord, start: float, end: float) -> float:
    """Tokens per second within a stretch, where each gap stands for one token spread evenly over it."""
    tokens = covered = 0.0
    for left, right in stream.gaps:
        overlap = min(end, right) - max(start, left)
        if overlap > 0 and right > left:
            tokens += overlap / (right - left)
            covered += overlap
    arrived = sum(start <= token < end for token in stream.tokens)
    return tokens / covered if covered else arrived / (end - start)


def _mark(share: float, glyphs: Glyphs) -> str:
    if share < STALL_SHARE:
        return glyphs.stall
    return glyphs.levels[min(len(glyphs.levels), max(1, round(share * len(glyphs.levels)))) - 1]


def _axis(width: int, span: float, glyphs: Glyphs) -> list[Row]:
    """A line with a tick at each round number of seconds, and the numbers below."""
    every = _round_step(span * 10 / width)
    line, numbers = [glyphs.line] * width, [" "] * (width + 8)
    for count in range(math.floor(span / every) + 1):
        column = min(width - 1, round(count * every / span * width))
        line[column] = glyphs.tick
        text = f"{count * every:g}s"
        numbers[column : column + len(text)] = text
    return [Row("", "".join(line)), Row("", "".join(numbers).rstrip())]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 x 10^n that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
