"""The demonstration: figures, picture, table and page from made-up phases; the whole of it on a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy.demo.html import report
from deploy.demo.load import LEAST_CHUNK
from deploy.demo.measure import LEAD_TOKENS, TAIL_TOKENS, Progress, note
from deploy.demo.record import PhaseRecord, StreamRecord, figures
from deploy.demo.runner import fitting_load, parse_policies
from deploy.demo.table import COLUMNS, cells, verdict
from deploy.demo.timeline import ASCII, UNICODE, Glyphs, timeline
from deploy.errors import CommandError


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
    assert verdict([chunked(), stalled()]) == (
        "Under whole running streams stood still for up to 6.00 s; under chunked for 500 ms at most (12.0 times "
        "shorter), and the long prompt's first token came 8% later."
    )
    assert verdict([chunked()]) == "Under chunked running streams stood still for up to 500 ms."


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


def test_policies_are_read_from_the_command_line() -> None:
    assert parse_policies(" whole, slo,whole") == ["whole", "slo"]
    for wrong in ("", ",", "whole,fastest"):
        with pytest.raises(CommandError) as caught:
            parse_policies(wrong)
        assert caught.value.exit_code == 2


def test_the_load_has_exact_lengths_and_outlasts_the_prefill(smollm2_dir: Path) -> None:
    load = fitting_load(smollm2_dir, streams=3, long=1000, max_model_len=8192)
    assert [len(prompt) for prompt in load.prompts] == [64, 64, 64]
    assert len(set(load.prompts)) == 3
    assert len(load.long) == 1000
    assert load.tokens > 1000 / LEAST_CHUNK + LEAD_TOKENS
    with pytest.raises(CommandError, match="context"):
        fitting_load(smollm2_dir, streams=3, long=1000, max_model_len=1000)


async def test_every_token_is_timed_however_they_come() -> None:
    """Three tokens in one event, one without text: counted by usage. An error inside a stream is one line."""
    events = [
        {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}},
        {"choices": [{"text": "bcd"}], "usage": {"completion_tokens": 4}},
        {"choices": [{"text": ""}], "usage": {"completion_tokens": 5}},
        {"choices": [], "usage": {"completion_tokens": 5}},
    ]
    seen = Progress()
    for event in events:
        note(f"data: {json.dumps(event)}", seen)
    note("data: [DONE]", seen)
    note(": a comment", seen)
    assert len(seen.tokens) == 5
    assert seen.tokens[1] == seen.tokens[3]
    with pytest.raises(CommandError, match="worker died"):
        note('data: {"error": {"message": "worker died"}}', seen)


@pytest.mark.timeout(600)
def test_the_demonstration_on_a_real_server(smollm2_dir: Path, tmp_path: Path) -> None:
    """Small, but all of it: Ray, Serve, HTTP, the policy changed between the phases, both reports."""
    page = tmp_path / "demo.html"
    small = ["--streams", "2", "--long", "384", "--chunk-size", "64", "--policies", "whole,chunked"]
    command = [sys.executable, "-m", "deploy.cli", "demo", "--json", "--html", str(page), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    whole, split = json.loads(line)["phases"]
    assert (whole["policy"], whole["chunk_size"]) == ("whole", None)
    assert (split["policy"], split["chunk_size"]) == ("chunked", 64)
    for phase in (whole, split):
        assert phase["long_tokens"] == 384
        assert len(phase["streams"]) == 2
        first, last = phase["long"]["tokens_ms"][0], phase["long"]["tokens_ms"][-1]
        for stream in phase["streams"]:  # it ran before, while and after the long request did
            assert sum(token <= phase["long"]["sent_ms"] for token in stream["tokens_ms"]) >= LEAD_TOKENS
            assert sum(token >= first for token in stream["tokens_ms"]) >= TAIL_TOKENS
            assert stream["tokens_ms"][-1] > last
    # Six chunks, each of which carries a token of both streams; whole, one gap each covers the prefill.
    assert split["gaps_during"] > whole["gaps_during"]
    assert whole["gap_max_ms"] > 0.9 * whole["ttft_long_ms"]
    assert page.read_text(encoding="utf-8").count("<svg") == 2
