"""A run as one SVG file: a lane for each group with its iterations, and a row for each of a few requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import median

from deploy.bench.record import RequestRecord
from deploy.compare.comparison import Compared, Comparison, Measured
from deploy.compare.excerpt import excerpt, window
from deploy.compare.ground import Step
from deploy.demo.picture import COLOURS, LEFT, ROW, WIDTH, axis, long_row, stream_row, x_of
from deploy.demo.record import StreamRecord

TOP = 24
_STYLE = f"{COLOURS}text{{font:12px system-ui,sans-serif;fill:var(--soft)}}text.title{{fill:var(--ink)}}"
_KV_LEGEND = "; amber KV on its way"
_LEGEND = "iterations: violet prompt tokens, blue one token of each stream; requests: a line a token, shaded stalls"


def write_figures(found: Comparison, folder: Path) -> list[Path]:
    """One file for each configuration that was run, of its first load, all from and to the same moment. Raises
    OSError."""
    runs = [(compared, compared.runs[0]) for compared in found.measured]
    between = window([excerpt(run.record.requests) for _, run in runs])
    written = []
    for compared, run in runs:
        file = folder / f"{re.sub('[^a-z0-9]+', '-', compared.name)}.svg"
        file.write_text(figure(compared, run, between), encoding="utf-8")
        written.append(file)
    return written


def figure(compared: Compared, run: Measured, between: tuple[float, float]) -> str:
    """`between`: seconds of the run at the left edge and at the right one. The axis counts from the left edge."""
    start, span = between[0], between[1] - between[0]
    records = [_later(record, start) for record in excerpt(run.record.requests) if record.tokens]
    steps = [replace(step, start_s=step.start_s - start, end_s=step.end_s - start) for step in run.steps]
    lanes = _lanes(compared, [step for step in steps if step.end_s > 0 and step.start_s < span])
    spans = () if run.transfers is None else run.transfers.spans
    moved = [(begun - start, ended - start) for begun, ended in spans if ended > start and begun < between[1]]
    apart = compared.configuration.kind == "alternate"
    rows: list[Callable[[int], Iterator[str]]] = []
    rows += [partial(_lane, label, computed, span=span, apart=apart) for label, computed in lanes]
    if moved:  # between those that it comes from and those that it goes to
        rows.insert(sum(label == "prefill" for label, _ in lanes), partial(_transfers, moved, span=span))
    rows += [partial(_request, record, span=span) for record in records]
    height = TOP + ROW * len(rows) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(compared.name)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="var(--page)"/>',
        f'<text class="title" x="0" y="14">{escape(compared.name)}</text>'
        f'<text x="{LEFT}" y="14">{_LEGEND}{_KV_LEGEND if moved else ""}</text>',
    ]
    for number, row in enumerate(rows):
        parts += row(TOP + ROW * number)
    parts += axis(span, height - 22)
    return "\n".join([*parts, "</svg>", ""])


def _later(record: RequestRecord, start: float) -> RequestRecord:
    """On a clock that begins at `start`."""
    return replace(record, sent_s=record.sent_s - start, tokens=tuple(token - start for token in record.tokens))


def _request(record: RequestRecord, top: int, span: float) -> Iterator[str]:
    stream = StreamRecord(record.sent_s, record.tokens)
    if record.kind == "stream":
        return stream_row(stream, "a stream", top, span)
    return long_row(stream, f"{record.prompt_tokens or 0:,} tokens", top, span)


def _transfers(spans: Sequence[tuple[float, float]], top: int, span: float) -> Iterator[str]:
    """Thin ones, since those of several requests may overlap."""
    yield f'<text x="0" y="{top + 15}">KV</text>'
    for begun, ended in spans:
        left, right = x_of(max(0.0, begun), span), x_of(min(ended, span), span)
        width = max(0.6, right - left)
        yield (
            f'<rect x="{left}" y="{top + 6}" width="{width:.1f}" height="10" fill="#d29922" opacity=".6">'
            f"<title>{(ended - begun) * 1e3:.1f} ms</title></rect>"
        )


def _lanes(compared: Compared, steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """Groups in their order, by what they do."""
    roles = [of.role for of in compared.resources.groups for _ in range(of.count)] if compared.resources else []
    by_group: dict[int, list[Step]] = {}
    for step in steps:
        by_group.setdefault(step.group, []).append(step)
    several = len(by_group) > 1
    return [
        (_label(roles[group] if group < len(roles) else "colocated", group, several), by_group[group])
        for group in sorted(by_group)
    ]


def _label(role: str, group: int, several: bool) -> str:
    if role == "colocated":
        return f"group {group + 1}" if several else "iterations"
    return role


def _lane(label: str, steps: Sequence[Step], top: int, span: float, apart: bool) -> Iterator[str]:
    """`apart`: an iteration of both is a forward of the prompt's and then one of a stream's. What the second took is
    not measured by itself: it is drawn as long as one without a prompt."""
    yield f'<text x="0" y="{top + 15}">{escape(label)}</text>'
    alone = [step.end_s - step.start_s for step in steps if not step.prefill_tokens]
    for step in steps:
        if step.prefill_tokens and step.decodes and apart:
            turn = max(step.start_s, step.end_s - (median(alone) if alone else 0.0))
            yield _box(step, step.start_s, turn, top + 3, 16, "--long", span)
            yield _box(step, turn, step.end_s, top + 3, 16, "--token", span)
        elif step.prefill_tokens and step.decodes:
            yield _box(step, step.start_s, step.end_s, top + 3, 11, "--long", span)
            yield _box(step, step.start_s, step.end_s, top + 14, 5, "--token", span)
        else:
            colour = "--long" if step.prefill_tokens else "--token"
            yield _box(step, step.start_s, step.end_s, top + 3, 16, colour, span)


def _box(step: Step, start: float, end: float, top: int, height: int, colour: str, span: float) -> str:
    """With a seam before the next one."""
    left, right = x_of(max(0.0, start), span), x_of(min(end, span), span)
    width = max(0.3, right - left - 0.6)
    told = f"{step.prefill_tokens} prompt tokens, {step.decodes} streams, {(step.end_s - step.start_s) * 1e3:.0f} ms"
    return (
        f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{height}" fill="var({colour})" opacity=".75">'
        f"<title>{told}</title></rect>"
    )
