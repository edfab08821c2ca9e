"""Workloads: arrivals and lengths as they are described, prompts that share what they should, and traces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.workloads import (
    ClosedLoop,
    Fixed,
    Interference,
    LogNormal,
    OpenLoop,
    PlannedRequest,
    RandomPrompt,
    TraceRow,
    Uniform,
    gamma,
    interference,
    parse_lengths,
    poisson,
    ramp,
    read_trace,
    replay,
    requests,
)
from cluster.workloads.prompts import VOCABULARY
from cluster.workloads.traces import parse_trace

# --- arrivals


def variation(times: list[float]) -> float:
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return pstdev(gaps) / fmean(gaps)


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (100.0, 0.1)])
def test_gamma_arrivals_are_as_bursty_as_asked(burstiness: float, expected: float) -> None:
    times = gamma(5, burstiness, 4000, seed=1)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert variation(times) == pytest.approx(expected, rel=0.05)


def test_poisson_is_gamma_without_bursts() -> None:
    assert poisson(2, 100, seed=3) == gamma(2, 1.0, 100, seed=3)
    assert variation(poisson(5, 4000)) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("first", "last"), [(1, 8), (8, 1), (0, 6), (6, 0), (3, 3)])
def test_a_ramp_goes_from_one_rate_to_the_other(first: float, last: float) -> None:
    times = ramp(first, last, 4000, seed=2)
    quarters = [sum(1000 * number <= time < 1000 * (number + 1) for time in times) / 1000 for number in range(4)]
    expected = [first + (last - first) * (number + 0.5) / 4 for number in range(4)]
    assert quarters == pytest.approx(expected, rel=0.1)


@given(st.floats(0.01, 50), st.floats(0.05, 20), st.floats(0.1, 20), st.integers(0, 5))
def test_arrivals_are_in_order_and_in_time(rate: float, burstiness: float, duration: float, seed: int) -> None:
    for times in (gamma(rate, burstiness, duration, seed), ramp(rate, burstiness, duration, seed)):
        assert times == sorted(times)
        assert all(0 <= time < duration for time in times)
    assert gamma(rate, burstiness, duration, seed) == gamma(rate, burstiness, duration, seed)


def test_another_seed_is_another_load() -> None:
    assert poisson(5, 10, seed=0) != poisson(5, 10, seed=1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_rate_and_no_time(value: float) -> None:
    for call in (lambda: poisson(value, 1), lambda: poisson(1, value), lambda: gamma(1, value, 1)):
        with pytest.raises(ValueError, match="must be above 0"):
            call()
    with pytest.raises(ValueError, match="must"):
        ramp(1, -1, 1)
    with pytest.raises(ValueError, match="at most"):
        poisson(1e6, 1e6)


# --- lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("512", Fixed(512)), ("64:1024", Uniform(64, 1024)), ("lognormal:512:0.8", LogNormal(512, 0.8))],
)
def test_lengths_from_text(text: str, lengths: object) -> None:
    assert parse_lengths(text) == lengths


@given(st.text(alphabet="0123456789:.-elognrmai", max_size=20))
def test_what_is_no_length_is_a_value_error(text: str) -> None:
    try:
        lengths = parse_lengths(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017
    else:
        assert lengths.draw(Random(0)) >= 1


@pytest.mark.parametrize("text", ["", "0", "-3", "9:3", "1:2:3", "9999999999", "lognormal:0:1", "lognormal:5:nan", "x"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="lognormal:512"):
        parse_lengths(text)


def test_half_of_a_lognormal_is_below_its_median() -> None:
    source = Random(0)
    drawn = sorted(LogNormal(500, 1.0).draw(source) for _ in range(10_001))
    assert drawn[5000] == pytest.approx(500, rel=0.05)
    assert sum(length > 500 * 7.1 for length in drawn) / len(drawn) == pytest.approx(0.025, abs=0.006)


# --- prompts


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def ids(request: PlannedRequest) -> list[int]:
    assert isinstance(request.prompt, RandomPrompt)
    return request.prompt.token_ids()


def test_prompts_share_no_prefix() -> None:
    plans = requests([0.0] * 50, Fixed(40), Fixed(4))
    found = [tuple(ids(plan)[:4]) for plan in plans]
    assert len(set(found)) == 50
    assert all(len(ids(plan)) == 40 and set(ids(plan)) <= set(VOCABULARY) for plan in plans)
    assert ids(plans[0]) == ids(requests([0.0], Fixed(40), Fixed(4))[0])
    assert ids(plans[0]) != ids(requests([0.0], Fixed(40), Fixed(4), seed=1)[0])
    texts = {plan.prompt.text() for plan in plans if isinstance(plan.prompt, RandomPrompt)}
    assert len(texts) == 50
    assert all(len(text.split()) == 40 for text in texts)


def test_a_shared_prefix_comes_on_top() -> None:
    one, other = requests([0.0] * 2, Uniform(20, 60), Fixed(4), shared_prefix=32)
    assert common(ids(one), ids(other)) == 32
    alone, _ = requests([0.0] * 2, Uniform(20, 60), Fixed(4))
    assert one.prompt_tokens == (alone.prompt_tokens or 0) + 32


def test_another_rate_sends_the_same_requests() -> None:
    slow, fast = (requests(poisson(rate, 10), Uniform(5, 50), Uniform(2, 9)) for rate in (2, 4))
    assert [plan.prompt for plan in slow] == [plan.prompt for plan in fast[: len(slow)]]
    assert [plan.output_tokens for plan in slow] == [plan.output_tokens for plan in fast[: len(slow)]]


def test_an_interference_has_streams_and_one_long_prompt() -> None:
    load = interference(3, 500)
    assert [plan.kind for plan in load.requests] == ["stream"] * 3 + ["long"]
    assert load.long.prompt_tokens == 500
    assert len({tuple(ids(plan)[:4]) for plan in load.requests}) == 4


def test_an_open_loop_is_in_order() -> None:
    plans = [PlannedRequest("late", 1, 2.0), PlannedRequest("early", 1, 1.0)]
    assert [plan.prompt for plan in OpenLoop(plans).requests] == ["early", "late"]


def test_plans_that_are_none() -> None:
    for call in (
        lambda: PlannedRequest("x", 0),
        lambda: PlannedRequest("x", 1, -1.0),
        lambda: PlannedRequest("x", 1, float("nan")),
        lambda: ClosedLoop([], 0),
        lambda: Interference([], PlannedRequest("x", 1)),
        lambda: RandomPrompt(0, "x"),
    ):
        with pytest.raises(ValueError, match=re.compile("at least|a time|interference")):
            call()


# --- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-02-29 23:59:59.5000000,100,10
2024-03-01 00:00:00.7500000,200,20
2024-03-01 00:00:02,50,0
"""
MOONCAKE = "".join(
    json.dumps({"timestamp": at, "input_length": length, "output_length": 7, "hash_ids": blocks}) + "\n"
    for at, length, blocks in [(0, 1300, [1, 2, 3]), (500, 1100, [1, 2, 9]), (3000, 600, [4, 5])]
)


def test_azure(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text("\ufeff" + AZURE.replace("\n", "\r\n"))
    rows = read_trace(tmp_path / "azure.csv")
    assert [row.at_s - rows[0].at_s for row in rows] == pytest.approx([0, 1.25, 2.5])
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(100, 10), (200, 20), (50, 0)]
    assert len(read_trace(tmp_path / "azure.csv", limit=2)) == 2


def test_mooncake(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    rows = read_trace(tmp_path / "trace.jsonl")
    assert rows[1] == TraceRow(0.5, 1100, 7, (1, 2, 9))


def test_a_replay_scales_rate_and_length() -> None:
    plans = replay(parse_trace(AZURE.splitlines()), rate_scale=2, length_scale=0.5, max_prompt=80).requests
    assert [plan.at_s for plan in plans] == pytest.approx([0, 0.625, 1.25])
    assert [plan.prompt_tokens for plan in plans] == [50, 80, 25]
    assert [plan.output_tokens for plan in plans] == [5, 10, 1]
    assert common(ids(plans[0]), ids(plans[1])) < 4
    whole = replay(parse_trace(AZURE.splitlines()), max_output=5).requests
    assert [plan.output_tokens for plan in whole] == [5, 5, 1]


@pytest.mark.parametrize(("scale", "shared"), [(1.0, 1024), (0.5, 512), (0.01, 10)])
def test_requests_with_the_same_leading_blocks_share_that_prefix(scale: float, shared: int) -> None:
    one, other, alone = replay(parse_trace(MOONCAKE.splitlines()), length_scale=scale).requests
    assert one.prompt_tokens == round(1300 * scale)
    assert common(ids(one), ids(other)) == shared
    assert common(ids(one), ids(alone)) < 4
    assert len(ids(one)) == one.prompt_tokens


def test_a_prefix_is_cut_with_its_prompt() -> None:
    one, other, _ = replay(parse_trace(MOONCAKE.splitlines()), max_prompt=700).requests
    assert ids(one) == ids(other)
    assert len(ids(one)) == 700


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("time,in,out\n1,2,3\n", "line 1: neither JSON nor"),
        (AZURE + "2024-03-01 00:00:03,1\n", "line 5: 2 columns"),
        (AZURE + "yesterday,1,2\n", "line 5: not a time"),
        (AZURE + "2024-03-01 00:00:03.x,1,2\n", "line 5: not a time"),
        (AZURE + "2024-03-01 00:00:03,many,2\n", "line 5: .*many"),
        (AZURE + "2024-03-01 00:00:03,-1,2\n", "line 5: ContextTokens"),
        (MOONCAKE + "\n{", "line 5: "),
        (MOONCAKE + "[]", "line 4: not a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}', "line 4: there is no 'output_length'"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 4: input_length"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 4: timestamp"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "line 4: hash_ids"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=f"trace: .*{words}|trace: {words}") as caught:
        read_trace(tmp_path / "trace")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for name, words in (("none", "cannot be read"), (".", "cannot be read"), ("binary", "is not text")):
        with pytest.raises(ValueError, match=words):
            read_trace(tmp_path / name)


_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=3)
)
_OBJECTS = st.dictionaries(st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids"]), _VALUES)
_STAMPS = st.text("0123456789-:. ", max_size=30) | st.datetimes().map(str)


@given(st.lists(st.text() | _OBJECTS.map(json.dumps), max_size=5), st.booleans())
def test_whatever_a_mooncake_file_has_is_a_trace_or_a_value_error(lines: list[str], begun: bool) -> None:
    survives([*MOONCAKE.splitlines(), *lines] if begun else lines)


@given(st.lists(st.text() | st.tuples(_STAMPS, st.integers(), st.text("0123456789-", max_size=9)).map(
    lambda row: ",".join(map(str, row))), max_size=5))  # fmt: skip
def test_whatever_an_azure_file_has_is_a_trace_or_a_value_error(lines: list[str]) -> None:
    survives([*AZURE.splitlines(), *lines])


@given(st.binary(max_size=200))
def test_whatever_bytes_a_file_has(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    file.write_bytes(content)
    try:
        read_trace(file)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017


def survives(lines: list[str]) -> None:
    try:
        rows = parse_trace(lines)
    except ValueError:
        return
    for plan in replay(rows, length_scale=0.5, max_prompt=1000, max_output=10).requests:
        assert plan.at_s >= 0
        assert len(ids(plan)) == plan.prompt_tokens
