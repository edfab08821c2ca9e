"""The decision log as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process for each worker group with its iterations and counters of the budget, and one for the requests with a track
each: the time in the queue, every chunk, every token, and every stall. Where KV moves from group to group, one more
with a track for each request's, and an arrow from there to the first token that came of it. What is on one track never
overlaps, unless one slice holds the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

Entry = dict[str, Any]
Event = dict[str, Any]

REQUESTS = 1
"""Process id of the requests; groups follow."""
STALL_FACTOR = 2.0
"""A gap of more than so many promised TPOTs is a stall, or one longer than the promised bound on gaps."""
UNPROMISED_MS = 3600e3
"""A promise this long is none; then a gap of five times the stream's median is a stall."""
UNPROMISED_FACTOR = 5.0
ROUNDED_US = 2.0
"""The log's times are rounded to microseconds, each by itself."""


@dataclass
class Track:
    """What the log says of one request. Times in milliseconds since the epoch."""

    number: int
    arrived: float
    tpot_ms: float
    tbt_ms: float | None
    chunks: list[tuple[float, float, Entry]] = field(default_factory=list)
    tokens: list[tuple[float, float]] = field(default_factory=list)
    moves: list[Entry] = field(default_factory=list)
    ended: float | None = None

    def stalls(self) -> Iterator[tuple[float, float]]:
        """(from, to) of each gap between two tokens that is longer than it should be."""
        ends = [end for _, end in self.tokens]
        gaps = [after - before for before, after in pairwise(ends)]
        if not gaps:
            return
        limit = STALL_FACTOR * self.tpot_ms if self.tpot_ms < UNPROMISED_MS else UNPROMISED_FACTOR * median(gaps)
        if self.tbt_ms is not None:
            limit = min(limit, self.tbt_ms)
        for before, gap in zip(ends, gaps, strict=False):
            if gap > limit:
                yield before, before + gap


def chrome_trace(entries: Sequence[Entry]) -> dict[str, Any]:
    """`entries` are those of /v1/stallfree/iterations or of the log file. Raises ValueError for what is no such log."""
    try:
        events = list(_events(entries))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is no iteration log: {type(error).__name__}: {error}") from None
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(entries: Sequence[Entry]) -> Iterator[Event]:
    """Names first, then everything by its time, what holds others before them."""
    groups = sorted({int(entry["group"]) for entry in entries})
    tracks = _tracks(entries)
    yield _name("process_name", REQUESTS, 0, "requests")
    for group in groups:
        yield _name("process_name", _process(group), 0, f"group {group}")
        yield _name("thread_name", _process(group), 0, "iterations")
    transfers = _process(groups[-1]) + 1 if groups else REQUESTS
    if any(track.moves for track in tracks.values()):
        yield _name("process_name", transfers, 0, "KV transfers")
    drawn = [event for entry in entries for event in _iteration(entry)]
    for request_id, track in tracks.items():
        drawn += [*_request(request_id, track), *_moves(request_id, track, transfers)]
    yield from (event for event in drawn if event["ph"] == "M")
    timed = sorted((event for event in drawn if event["ph"] != "M"), key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    _separate(timed)
    yield from timed


def _separate(timed: Sequence[Event]) -> None:
    """Times were rounded one by one: slices that follow each other, or end together, are made to do so exactly."""
    open_slices: dict[tuple[int, int], list[Event]] = {}
    for event in timed:
        if event["ph"] != "X":
            continue
        around = open_slices.setdefault((event["pid"], event["tid"]), [])
        while around and _end(around[-1]) <= event["ts"] + ROUNDED_US:
            last = around.pop()
            last["dur"] = max(0.0, round(min(last["dur"], event["ts"] - last["ts"]), 1))
        if around and 0 < _end(event) - _end(around[-1]) <= ROUNDED_US:
            event["dur"] = max(0.0, round(_end(around[-1]) - event["ts"], 1))
        around.append(event)


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _iteration(entry: Entry) -> Iterator[Event]:
    process, start, length = _process(entry["group"]), entry["start_ms"], entry["actual_ms"]
    shown = ("seq", "budget", "bound", "allowed_ms", "tightest", "prefill_tokens", "decodes", "predicted_ms")
    name = f"{entry['prefill_tokens']} + {entry['decodes']}"
    yield _slice(process, 0, name, start, length, {key: entry[key] for key in (*shown, "actual_ms", "preempted")})
    yield _counter(process, "token budget", start, {"budget": entry["budget"], "prefill": entry["prefill_tokens"]})
    yield _counter(process, "decodes", start, {"decodes": entry["decodes"]})
    predicted = entry["predicted_ms"]
    if predicted is not None:
        yield _counter(process, "iteration (ms)", start, {"predicted": predicted, "actual": length})


def _tracks(entries: Sequence[Entry]) -> dict[str, Track]:
    """By request, in the order in which they came."""
    tracks: dict[str, Track] = {}
    for entry in entries:
        start, end = float(entry["start_ms"]), float(entry["start_ms"]) + float(entry["actual_ms"])
        for chunk in entry["chunks"]:
            if chunk["request"] not in tracks:
                arrived = start - chunk["waited_ms"]
                number = len(tracks) + 1
                tracks[chunk["request"]] = Track(number, arrived, chunk["tpot_ms"], chunk["tbt_ms"])
            tracks[chunk["request"]].chunks.append((start, end, chunk))
        for request_id in entry["tokens"]:
            if request_id in tracks:  # else it began before the log does
                tracks[request_id].tokens.append((start, end))
        for request_id in entry["finished"]:
            if request_id in tracks:
                tracks[request_id].ended = end
        for moved in entry.get("transfers", ()):
            if moved["request"] in tracks:
                tracks[moved["request"]].moves.append(moved)
    return tracks


def _request(request_id: str, track: Track) -> Iterator[Event]:
    number = track.number
    yield _name("thread_name", REQUESTS, number, request_id)
    yield {"ph": "M", "name": "thread_sort_index", "pid": REQUESTS, "tid": number, "args": {"sort_index": number}}
    begun = track.chunks[0][0]
    if begun > track.arrived:
        yield _slice(REQUESTS, number, "queue", track.arrived, begun - track.arrived, {})
    prefilled = set()
    for start, end, chunk in track.chunks:
        name = f"chunk {chunk['offset']}+{chunk['count']}"
        prefilled.add(start)
        yield _slice(REQUESTS, number, name, start, end - start, chunk)
    for index, (start, end) in enumerate(track.tokens):
        if start not in prefilled:  # the first token comes out of the last chunk
            yield _slice(REQUESTS, number, f"token {index}", start, end - start, {})
    for start, end in track.stalls():
        # It holds the late token's slice, since it ends with it.
        yield {
            **_slice(REQUESTS, number, f"stall of {end - start:.0f} ms", start, end - start, {}),
            "cname": "terrible",
        }
    if track.ended is not None:
        yield {"ph": "i", "name": "end", "s": "t", "pid": REQUESTS, "tid": number, "ts": _us(track.ended)}


def _moves(request_id: str, track: Track, process: int) -> Iterator[Event]:
    """Each part of its KV as it was on its way, and what came of it."""
    if not track.moves:
        return
    yield _name("thread_name", process, track.number, request_id)
    for number, moved in enumerate(track.moves):
        told = {key: value for key, value in moved.items() if key != "sends"}
        for index, (begun, ended) in enumerate(moved["sends"]):
            name = f"KV to group {moved['target']}" if index == 0 else f"part {index + 1}"
            yield _slice(process, track.number, name, begun, max(0.0, ended - begun), told if index == 0 else {})
        if not moved["sends"]:
            continue  # everything was there already
        begun, ended = moved["sends"][-1]
        after = next((start for start, _ in track.tokens if start >= ended), None)
        if after is not None:
            arrow = {"cat": "kv", "name": "KV", "id": f"{track.number}.{number}"}
            yield {**arrow, "ph": "s", "pid": process, "tid": track.number, "ts": _us(begun)}
            yield {**arrow, "ph": "f", "bp": "e", "pid": REQUESTS, "tid": track.number, "ts": _us(after)}


def _process(group: int) -> int:
    return REQUESTS + 1 + int(group)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start: float, length: float, args: Entry) -> Event:
    times = {"ts": _us(start), "dur": _us(length)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _counter(process: int, name: str, at: float, values: dict[str, Any]) -> Event:
    return {"ph": "C", "name": name, "pid": process, "ts": _us(at), "args": values}


def _us(milliseconds: float) -> float:
    """Chrome's unit is the microsecond."""
    return round(milliseconds * 1e3, 1)
