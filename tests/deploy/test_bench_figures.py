"""Figures of made-up runs against numbers worked out by hand; the report, the plots and the comparison of two runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.bench import RequestRecord, RunRecord, SloTargets, Spread, as_json, figures
from deploy.bench.diff import as_table, compare, diff_json, read_run
from deploy.bench.html import page
from deploy.bench.plots import CDF_POINTS, SAMPLE, cdf, plots, running, sample
from deploy.bench.record import CountedBy, Outcome
from deploy.bench.show import duration, show
from deploy.bench.slo import parse_slo
from deploy.errors import CommandError


def record(due: float, tokens: tuple[float, ...], ended: float, **more: Any) -> RequestRecord:
    facts = {
        "kind": "request", "due_s": due, "sent_s": due, "tokens": tokens, "ended_s": ended, "prompt_tokens": 10,
        "asked_tokens": len(tokens), "outcome": Outcome.FINISHED, "counted_by": CountedBy.TOKEN_IDS,
    }  # fmt: skip
    return RequestRecord(**{**facts, **more})


def run_of(*records: RequestRecord, **more: Any) -> RunRecord:
    facts = {"duration_s": 20.0, "started_at": 1.7e9, "open_loop": True, "planned": len(records)}
    return RunRecord(records, **{**facts, **more})


FAST = record(1.0, (1.5, 1.6, 1.7), 1.75)
"""TTFT 0.5, gaps 0.1 and 0.1, TPOT 0.1, E2E 0.75."""
SLOW = record(2.0, (4.0, 4.2, 5.2), 6.0, sent_s=2.1)
"""TTFT 1.9, gaps 0.2 and 1.0, TPOT 0.6, E2E 3.9, sent 0.1 late."""
SINGLE = record(3.0, (3.25,), 3.25)
"""TTFT 0.25, no gap, E2E 0.25."""
LOST = record(4.0, (4.5, 4.7), 11.0, outcome=Outcome.FAILED, error="cut short", message="gone")
"""TTFT 0.5, gap 0.2."""
REFUSED = record(5.0, (), 5.1, outcome=Outcome.FAILED, error="429", counted_by=None)
RUN = run_of(FAST, SLOW, SINGLE, LOST, REFUSED)


def test_figures_are_those_worked_out_by_hand() -> None:
    found = figures(RUN, SloTargets(ttft_s=0.5, tpot_s=0.1 + 1e-9))
    assert (found.requests, found.finished, found.failed, found.unfinished) == (5, 3, 2, 0)
    assert found.errors == {"cut short": 1, "429": 1}
    assert found.ttft.n == 4
    assert found.ttft.mean == pytest.approx((0.5 + 1.9 + 0.25 + 0.5) / 4)
    assert found.ttft.p50 == pytest.approx(0.5)
    assert found.ttft.max == pytest.approx(1.9)
    assert found.ttft.p90 == pytest.approx(0.5 + 0.7 * 1.4)  # 0.9 x 3 = 2.7: between the third and the fourth value
    assert found.itl.n == 5
    assert found.itl.mean == pytest.approx((0.1 + 0.1 + 0.2 + 1.0 + 0.2) / 5)
    assert found.tpot.n == 3
    assert found.tpot.p50 == pytest.approx(0.2)
    assert found.e2e.n == 3
    assert found.e2e.max == pytest.approx(3.9)
    assert found.largest_stall_s == pytest.approx(1.0)
    assert found.largest_stall_at_s == pytest.approx(4.2)
    assert found.window_s == pytest.approx(11.0)
    assert found.output_tokens == 9
    assert found.prompt_tokens == 30
    assert found.tokens_per_s == pytest.approx(9 / 11)
    assert found.requests_per_s == pytest.approx(3 / 11)
    assert found.met == 2  # FAST and SINGLE
    assert found.attainment == pytest.approx(2 / 5)
    assert found.goodput_per_s == pytest.approx(2 / 11)
    assert found.lateness.max == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SloTargets(ttft_s=2.0), 3),
        (SloTargets(ttft_s=0.3), 1),
        (SloTargets(tpot_s=0.65), 3),
        (SloTargets(tpot_s=0.65, tbt_s=0.9), 2),
        (SloTargets(ttft_s=2.0, tpot_s=0.65, tbt_s=1.1), 3),
    ],
)
def test_a_promise_is_kept_in_all_its_parts(slo: SloTargets, met: int) -> None:
    assert figures(RUN, slo).met == met
    assert figures(RUN, slo).attainment == pytest.approx(met / 5)


def test_without_a_promise_there_is_no_attainment() -> None:
    found = figures(RUN)
    assert (found.attainment, found.goodput_per_s, found.met) == (None, None, 0)


def test_what_was_due_before_the_window_is_not_counted() -> None:
    found = figures(RUN, SloTargets(ttft_s=0.5), skip_s=2.5)
    assert (found.requests, found.skipped, found.finished) == (3, 2, 1)
    assert found.window_s == pytest.approx(11.0 - 2.5)
    assert found.itl.n == 1
    assert found.goodput_per_s == pytest.approx(1 / 8.5)


def test_what_was_interrupted_counts_neither_way() -> None:
    cut = record(1.0, (1.1,), 1.2, outcome=Outcome.UNFINISHED)
    found = figures(run_of(FAST, cut, interrupted=True, planned=7), SloTargets(ttft_s=1.0))
    assert (found.unfinished, found.attainment) == (1, 1.0)
    assert "2 of 7" in found.warnings[0]


def test_a_run_without_anything_has_figures() -> None:
    found = figures(run_of(interrupted=True), SloTargets(ttft_s=1.0))
    assert (found.requests, found.ttft, found.attainment) == (0, Spread(0), None)
    assert as_json(run_of(), found)["ttft_ms"] == dict.fromkeys(["mean", "p50", "p90", "p99", "max"]) | {"n": 0}
    everything_was_skipped = figures(RUN, skip_s=100.0)
    assert (everything_was_skipped.requests, everything_was_skipped.window_s) == (0, 0.0)
    assert "Load test" in page(run_of(), found)


def test_a_client_that_sends_late_says_so() -> None:
    punctual = run_of(*[record(0.0, (1.0,), 1.0, sent_s=0.02) for _ in range(10)])
    assert figures(punctual).warnings == ()
    late = run_of(*[record(0.0, (1.0,), 1.0, sent_s=0.06) for _ in range(10)])
    assert "late (p99 60 ms)" in figures(late).warnings[0]
    closed = run_of(*[record(0.0, (1.0,), 1.0, sent_s=0.06) for _ in range(10)], open_loop=False)
    assert figures(closed).warnings == ()


def intruded() -> RunRecord:
    """Two streams with a token every 0.1 s until 2.0, then one at 5.0 and every 0.1 s again; a long prompt at 2.05."""
    tokens = (*(round(0.1 * count, 1) for count in range(1, 21)), 5.0, 5.1, 5.2)
    streams = [record(0.0, tokens, 5.2, kind="stream", left=True) for _ in range(2)]
    return run_of(*streams, record(2.05, (5.0, 5.1), 5.2, kind="long"), open_loop=False)


def test_what_the_long_prompt_did_to_the_streams() -> None:
    found = figures(intruded())
    seen = found.intrusion
    assert seen is not None
    assert (seen.streams, seen.running) == (2, 2)
    assert seen.ttft_long_s == pytest.approx(2.95)
    assert (seen.before.n, seen.during.n) == (2 * 19, 2)
    assert seen.before.p50 == pytest.approx(0.1)
    assert seen.during.p50 == pytest.approx(3.0)
    assert found.by_kind["stream"].largest_stall_s == pytest.approx(3.0)
    assert found.by_kind["long"].itl.max == pytest.approx(0.1)
    assert as_json(intruded(), found)["interference"]["gaps_during_ms"]["max"] == pytest.approx(3000)
    assert figures(RUN).intrusion is None


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_a_spread_is_in_order(values: list[float]) -> None:
    found = Spread.of([*values, None])
    assert found.n == len(values)
    if values:
        ordered = [found.p50, found.p90, found.p99, found.max]
        assert ordered == sorted(ordered)  # type: ignore[type-var]
        assert found.max == max(values)


# --- promises


def test_promises_from_a_command_line() -> None:
    assert parse_slo("ttft_ms=2000, tpot_ms=100") == SloTargets(ttft_s=2.0, tpot_s=0.1)
    assert parse_slo("tbt_ms=300").as_body() == {"tbt_ms": 300.0}


@pytest.mark.parametrize(
    "text", ["", "ttft_ms", "ttft_ms=", "ttft_ms=fast", "ttft_ms=0", "ttft_ms=-1", "ttft_ms=nan", "ttft_ms=inf",
             "ttft=5", "ttft_ms=1,ttft_ms=2", "ttft_ms=1;tpot_ms=2"],
)  # fmt: skip
def test_what_is_no_promise(text: str) -> None:
    with pytest.raises(ValueError, match=r"_ms|_s must"):
        parse_slo(text)


# --- report and comparison


def test_the_json_has_all_figures_in_milliseconds() -> None:
    found = figures(RUN, SloTargets(ttft_s=0.5))
    content = json.loads(json.dumps(as_json(RUN, found, raw=True), allow_nan=False))
    assert content["ttft_ms"]["max"] == 1900.0
    assert content["slo"] == {"ttft_ms": 500.0}
    assert content["errors"] == {"cut short": 1, "429": 1}
    assert content["largest_stall_ms"] == 1000.0
    assert [len(request["tokens_ms"]) for request in content["raw"]] == [3, 3, 1, 2, 0]
    assert content["raw"][3]["message"] == "gone"
    assert "raw" not in as_json(RUN, found)


def test_the_terminal_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console(width=100), RUN, figures(RUN, SloTargets(ttft_s=0.5)))
    said = capsys.readouterr().out
    for words in ("TTFT", "1.90 s", "3 of 5 requests finished in 11.0 s", "largest stall 1.00 s, at 4.2 s",
                  "attainment 40.0%", "1 x 429", "warning: this client sent late"):  # fmt: skip
        assert words in said, words
    show(Console(width=100), intruded(), figures(intruded()))
    assert "first token after 2.95 s" in capsys.readouterr().out
    assert [duration(value) for value in (None, 0.0, 3.5e-6, 0.0123, 0.25, 2.5, 1234)] == [
        "-",
        "0.0 ms",
        "3.5 us",
        "12.3 ms",
        "250 ms",
        "2.50 s",
        "1,234 s",
    ]


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = SloTargets(ttft_s=0.5)
    one, other = run_of(FAST, SLOW), run_of(FAST, FAST)
    for name, run in (("a", one), ("b", other)):
        (tmp_path / name).write_text(json.dumps(as_json(run, figures(run, slo))))
    rows = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    by_name = {row.name: row for row in rows}
    assert by_name["TTFT max, ms"].a == 1900.0
    assert by_name["TTFT max, ms"].ratio == pytest.approx(500 / 1900)
    assert (by_name["attainment"].a, by_name["attainment"].b, by_name["attainment"].ratio) == (0.5, 1.0, 2.0)
    assert by_name["failed"].ratio is None
    assert "gaps during n" not in by_name
    assert diff_json(rows)["rows"][0] == {"figure": "TTFT n", "a": 2.0, "b": 2.0, "ratio": 1.0}
    Console(width=100).print(as_table(rows))
    assert "0.26" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "nonsense", "[" * 100_000])
def test_what_is_no_result_is_not_compared(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(CommandError, match="--diff"):
        read_run(tmp_path / "file")
    with pytest.raises(CommandError, match="cannot be read"):
        read_run(tmp_path / "none")


def test_a_result_with_strange_values_is_compared_as_far_as_it_goes() -> None:
    rows = compare({"ttft_ms": {"p50": "fast"}, "requests": True, "failed": 2}, {"ttft_ms": 3, "failed": 1})
    assert [(row.name, row.ratio) for row in rows] == [("failed", 0.5)]


# --- plots


def test_plots_are_what_plotly_draws() -> None:
    for run in (RUN, intruded(), run_of()):
        for plot in plots(run, figures(run, SloTargets(ttft_s=0.5, tpot_s=0.1))):
            plotly.graph_objects.Figure(plot)  # raises for a property that there is not
    ttft, itl, tokens, load = plots(RUN, figures(RUN, SloTargets(ttft_s=0.5)))
    assert ttft["data"][0]["x"][-1] == 1900.0
    assert ttft["layout"]["shapes"][0]["x0"] == 500.0
    assert itl["data"][0]["name"] == "request (n 5)"
    assert len(tokens["data"][1]["x"]) == 9
    assert max(load["data"][0]["y"]) == 3


def test_a_cdf_says_which_share_is_at_most_so_large() -> None:
    (curve,) = cdf("", {"a": [0.004, None, 0.001, 0.002, 0.002]})["data"]
    assert curve["name"] == "a (n 4)"
    assert list(zip(curve["x"], curve["y"], strict=True)) == [
        (1.0, 0.0),
        (1.0, 0.25),
        (2.0, 0.5),
        (2.0, 0.75),
        (4.0, 1),
    ]
    (curve,) = cdf("", {"a": [n / 1e3 for n in range(1, 10_001)]})["data"]
    assert (len(curve["x"]), curve["x"][-1], curve["y"][-1]) == (CDF_POINTS + 1, 10_000.0, 1.0)
    assert all(
        share == pytest.approx(time / 1e4, abs=1e-4) for time, share in zip(curve["x"][1:], curve["y"][1:], strict=True)
    )


def test_how_many_are_under_way() -> None:
    times, counts = running([record(0.0, (), 2.0), record(1.0, (), 3.0), record(2.0, (), 4.0)])
    assert list(zip(times, counts, strict=True)) == [(0.0, 1), (1.0, 2), (2.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)]


def test_a_sample_is_even() -> None:
    records = [record(float(number), (), number + 1.0) for number in range(1000)]
    chosen = sample(records)
    assert len(chosen) == SAMPLE
    assert (chosen[0], chosen[-1]) == (records[0], records[-1])
    assert sample(records[:3]) == records[:3]


def test_the_page_needs_nothing_else_and_runs_no_text_of_a_server() -> None:
    run = run_of(record(0.0, (0.1, 0.2), 0.3, kind="</script><script>alert(1)"), facts={"model": "<b>mine</b>"})
    content = page(run, figures(run))
    assert "&lt;b&gt;mine" in content
    assert "alert(1)" in content
    assert content.count("</script>") == 2
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", content)
