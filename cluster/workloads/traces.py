"""Traces of real traffic, in the two formats that are public: Azure's CSV and Mooncake's JSON lines.

Neither has a prompt in it, only lengths; Mooncake's also says which blocks of prompts were the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cluster.workloads.lengths import MOST
from cluster.workloads.planned import OpenLoop, PlannedRequest
from cluster.workloads.prompts import TRACE_BLOCK, RandomPrompt

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LATEST_S = 1e10
"""Some three hundred years: a timestamp beyond it is none."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace: `at_s` on the trace's own clock, lengths in tokens, and the ids of its prompt's blocks of
    512 tokens (none where the format has none)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` requests of a file, its format recognised by the first line. Raises ValueError that names the
    line where one is malformed, and where the file cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return parse_trace(lines, limit)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def parse_trace(lines: Iterable[str], limit: int | None = None) -> list[TraceRow]:
    """See read_trace."""
    numbered = ((number, line.strip()) for number, line in enumerate(lines, 1))
    filled = ((number, line) for number, line in numbered if line)
    first = next(filled, None)
    if first is None:
        raise ValueError("the trace is empty")
    parse, rest = (_mooncake, chain([first], filled)) if first[1].startswith("{") else (_azure, filled)
    if parse is _azure and tuple(column.strip() for column in first[1].split(",")) != AZURE_COLUMNS:
        raise ValueError(f"line {first[0]}: neither JSON nor the columns {','.join(AZURE_COLUMNS)}")
    rows = list(islice(_parsed(rest, parse), limit))
    if not rows:
        raise ValueError("the trace has no requests")
    return rows


def replay(
    rows: Iterable[TraceRow],
    *,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt: int | None = None,
    max_output: int | None = None,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> OpenLoop:
    """The requests of a trace from time 0 on, `rate_scale` times as fast, with prompts and outputs `length_scale` times
    as long and then cut to the given numbers of tokens. Blocks are scaled with their prompts, so that the same share
    of a prompt is common to others."""
    for name, value in (("rate scale", rate_scale), ("length scale", length_scale)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {name} must be above 0, got {value}")
    rows = sorted(rows, key=lambda row: row.at_s)
    block = max(1, round(TRACE_BLOCK * length_scale))

    def planned(number: int, row: TraceRow) -> PlannedRequest:
        tokens = _scaled(row.prompt_tokens, length_scale, max_prompt)
        return PlannedRequest(
            prompt=RandomPrompt(tokens, f"{seed}/trace/{number}", row.blocks, block, f"{seed}/trace"),
            output_tokens=_scaled(row.output_tokens, length_scale, max_output),
            at_s=(row.at_s - rows[0].at_s) / rate_scale,
            extra=extra or {},
        )

    return OpenLoop([planned(number, row) for number, row in enumerate(rows)])


def _scaled(tokens: int, scale: float, most: int | None) -> int:
    """At least 1: a model generates a token for whatever it is given, and takes no empty prompt."""
    return max(1, min(round(min(tokens * scale, MOST)), MOST if most is None else most))


def _parsed(numbered: Iterable[tuple[int, str]], parse: Any) -> Iterator[TraceRow]:
    for number, line in numbered:
        try:
            yield parse(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {number}: {said}") from None


def _azure(line: str) -> TraceRow:
    values = line.split(",")
    if len(values) != len(AZURE_COLUMNS):
        raise ValueError(f"{len(values)} columns where there should be {len(AZURE_COLUMNS)}")
    stamp, prompt, output = (value.strip() for value in values)
    return TraceRow(_seconds(stamp), _count("ContextTokens", int(prompt)), _count("GeneratedTokens", int(output)))


def _seconds(stamp: str) -> float:
    """From `2023-11-16 18:15:46.6805900`: seven digits after the point are more than Python reads."""
    whole, _, fraction = stamp.partition(".")
    if fraction and not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 12):
        raise ValueError(f"not a time: {stamp!r}")
    try:
        moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"not a time: {stamp!r}") from None
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(line: str) -> TraceRow:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    at_ms, blocks = fields["timestamp"], fields.get("hash_ids") or []
    if isinstance(at_ms, bool) or not isinstance(at_ms, (int, float)) or not abs(at_ms) < _LATEST_S * 1e3:
        raise ValueError(f"timestamp is no time in milliseconds: {at_ms!r:.40}")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids is no list of integers")
    return TraceRow(
        at_ms / 1e3,
        _count("input_length", fields["input_length"]),
        _count("output_length", fields["output_length"]),
        tuple(blocks),
    )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{name} is no number of tokens up to {MOST:,}: {value!r:.40}")
    return int(value)
