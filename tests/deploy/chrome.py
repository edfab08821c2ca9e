"""What a trace has to be for Perfetto and chrome://tracing to draw all of it: the Trace Event Format, strictly."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

NEEDED = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "ph", "pid", "ts", "args"},
    "i": {"name", "ph", "pid", "tid", "ts", "s"},
    "s": {"name", "ph", "pid", "tid", "ts", "cat", "id"},
    "f": {"name", "ph", "pid", "tid", "ts", "cat", "id", "bp"},
}
OPTIONAL = {"X": {"cname"}}
NAMED = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Its events, none of which would be dropped or drawn wrong."""
    json.dumps(trace, allow_nan=False)
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        _check_event(event)
    _check_names(events)
    _check_order(events)
    _check_slices(events)
    _check_arrows(events)
    return events


def _check_event(event: dict[str, Any]) -> None:
    kind = event["ph"]
    assert NEEDED[kind] <= event.keys() <= NEEDED[kind] | OPTIONAL.get(kind, set()), event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid") if key in event), event
    for key in ("ts", "dur"):
        if key in event:
            assert type(event[key]) in (int, float), event
            assert 0 <= event[key] < math.inf, event
    if kind == "C":
        assert event["args"]
        assert all(type(value) in (int, float) for value in event["args"].values()), event
    if kind == "M":
        assert list(event["args"]) == [NAMED[event["name"]]], event
    if kind == "i":
        assert event["s"] in ("g", "p", "t")


def _check_names(events: list[dict[str, Any]]) -> None:
    """Each process and each of its tracks has one name."""
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(set(named)) == len(named)
    assert len(set(processes)) == len(processes)
    assert {(e["pid"], e["tid"]) for e in events if "tid" in e and e["ph"] != "M"} <= set(named)
    assert {e["pid"] for e in events} <= set(processes)


def _check_order(events: list[dict[str, Any]]) -> None:
    kinds = [event["ph"] == "M" for event in events]
    assert kinds == sorted(kinds, reverse=True), "names come first"
    last: dict[Any, float] = defaultdict(float)
    for event in events:
        if event["ph"] != "M":
            track = event["pid"], event.get("tid", event["name"])
            assert event["ts"] >= last[track], event
            last[track] = event["ts"]


def _check_slices(events: list[dict[str, Any]]) -> None:
    """Of one track: side by side, or one within the other."""
    around: dict[Any, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            ends, end = around[event["pid"], event["tid"]], round(event["ts"] + event["dur"], 1)
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1], f"overlaps with what begins before it: {event}"
            ends.append(end)


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """From within a slice to within a slice that begins no earlier, each id once."""
    starts = {(e["cat"], e["name"], e["id"]): e for e in events if e["ph"] == "s"}
    ends = {(e["cat"], e["name"], e["id"]): e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events)
    for key, start in starts.items():
        assert start["ts"] <= ends[key]["ts"]
        for end in (start, ends[key]):
            assert any(
                e["ph"] == "X"
                and (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
                for e in events
            ), end
