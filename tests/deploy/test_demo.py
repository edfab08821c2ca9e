"""The demonstration: figures, picture, table and page from made-up phases; the whole of it on a real server."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from deploy.demo.html import report
from deploy.demo.record import PhaseRecord, StreamRecord, figures
from deploy.demo.table import COLUMNS, cells, verdict
from deploy.demo.timeline import ASCII, UNICODE, Glyphs, timeline


def stalled() -> PhaseRecord:
    """Two streams of ten tokens a second that stand still from 2 s to 8 s, while a long prompt is prefilled."""
    before, after = [0.1 * count for count in range(1, 21)], [8.0 + 0.1 * count for count in range(20)]
    streams = tuple(StreamRecord(0.0, (*before, *after)) for _ in range(2))
    return PhaseRecord("whole", None, streams, StreamRecord(2.05, (8.0, 8.1, 8.2)), 2048)


def chunked() -> PhaseRecord:
    """The same with a token every half second meanwhile."""
    before, during = [0.1 * count for count in range(1, 21)], [2.0 + 0.5 * count for count in range(1, 14)]
    after = [8.5 + 0.1 * count for count in range(1, 8)]
    streams = tuple(StreamRecord(0.0, (*before, *during, *after)) for _ in range(2))
    return PhaseRecord("chunked", 128, streams, StreamRecord(2.05, (8.5, 8.6)), 2048)


def test_figures_say_what_happened() -> None:
    whole, split = figures(stalled()), figures(chunked())
    assert whole.ttft_long_s == pytest.approx(5.95)
    assert split.ttft_long_s == pytest.approx(6.45)
    assert whole.gap_max_s == pytest.approx(6.0)
    assert split.gap_max_s == pytest.approx(0.5)
    assert whole.gap_before_s == split.gap_before_s == pytest.approx(0.1)
    assert (whole.n_during, split.n_during) == (2, 24)
    assert split.gap_during_s == pytest.approx(0.5)
    assert whole.tpot_s == pytest.approx((9.9 - 0.1) / 39)
    assert whole.tokens_per_s == pytest.approx(2 * 39 / 9.8)
    assert whole.as_json()["gap_max_ms"] == 6000.0


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [20, 100, 101])
def test_a_stall_is_visible_and_a_slow_stretch_is_no_stall(glyphs: Glyphs, width: int) -> None:
    rows = timeline(stalled(), width, 10.0, glyphs)
    assert [row.label for row in rows] == ["stream 1", "stream 2", "2,048 tokens", "", ""]
    assert all(len(row.cells) == width for row in rows[:4])
    stream = rows[0].cells
    assert stream.count(glyphs.stall) == pytest.approx(0.6 * width, abs=2)
    assert stream[int(0.4 * width)] == glyphs.stall
    assert stream[int(0.15 * width)] == glyphs.levels[-1]
    assert stream.rstrip(" ")[-1] in glyphs.levels
    waiting = rows[2].cells
    assert waiting.count(glyphs.waiting) == pytest.approx(0.6 * width, abs=2)
    assert waiting.startswith(" " * int(0.19 * width))
    slow = timeline(chunked(), width, 10.0, glyphs)[0].cells
    assert glyphs.stall not in slow
    assert slow[int(0.5 * width)] in glyphs.levels[:2]


def test_the_ascii_picture_is_ascii() -> None:
    assert all(row.cells.isascii() for row in timeline(stalled(), 60, 10.0, ASCII))


@pytest.mark.parametrize(("span", "width"), [(10.0, 100), (0.35, 80), (173.0, 60), (9.99, 33)])
def test_the_axis_has_round_numbers_at_their_places(span: float, width: int) -> None:
    line, numbers = (row.cells for row in timeline(stalled(), width, span, ASCII)[-2:])
    found = [(match.start(), float(match[1])) for match in re.finditer(r"([\d.]+)s", numbers)]
    assert len(found) >= 2
    for column, second in found:
        assert column == pytest.approx(min(width - 1, second / span * width), abs=0.51)
        assert line[column] == ASCII.tick


def test_the_table_and_the_verdict() -> None:
    assert cells(stalled()) == ("whole", "5.95 s", "251 ms", "100 ms", "6.00 s", "6.00 s", "8.0")
    assert len(COLUMNS) == len(cells(chunked()))
    assert verdict([stalled(), chunked()]) == (
        "Under whole the long prompt stalled running streams for up to 6.00 s; under chunked no gap was longer than "
        "500 ms (12.0 times shorter), and its first token came 8% later."
    )
    assert "500 ms" in verdict([chunked()])


def test_the_page_stands_alone() -> None:
    page = report([stalled(), chunked()], {"model": "<tiny> & co"})
    assert "&lt;tiny&gt; &amp; co" in page
    assert re.findall(r"""(?:src|href)=|url\(|@import|https?:""", page) == []
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(pictures) == 2
    stalls = [[rect for rect in svg.iter("rect") if rect.get("fill") == "var(--stall)"] for svg in pictures]
    assert [len(found) for found in stalls] == [2, 0]
    tokens = [path.get("d", "").count("M") for path in pictures[0].iter("path")]
    assert tokens[:3] == [40, 40, 3]
    for cell in (*COLUMNS, *cells(stalled()), *cells(chunked())):
        assert f">{cell}<" in page
