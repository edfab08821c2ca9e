"""Lengths from a table: prompts and outputs of real requests, to which arrivals are added."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from cluster.workloads import ClosedLoop, OpenLoop, PlannedRequest, RandomPrompt
from cluster.workloads.lengths import MOST

COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("prompt_tokens", "output_tokens"),
)
"""Of prompt and output, by which a table is known: Vidur's, Azure's, and our own names."""
Pair = tuple[int, int]


def read_lengths(path: Path) -> list[Pair]:
    """Raises ValueError that names the file, and the line where one is malformed."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            names = next((pair for pair in COLUMNS if set(pair) <= set(rows.fieldnames or ())), None)
            if names is None:
                known = " or ".join(",".join(pair) for pair in COLUMNS)
                raise ValueError(f"no columns of lengths; known: {known}")
            found = [_pair(rows.line_num, row[names[0]], row[names[1]]) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--lengths: {path} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"--lengths: {path.name}: {error}") from None
    if not found:
        raise ValueError(f"--lengths: {path.name} has no lengths")
    return found


def _pair(line: int, prompt: str | None, output: str | None) -> Pair:
    try:
        pair = int(prompt or ""), int(output or "")
    except ValueError:
        raise ValueError(f"line {line}: not two numbers of tokens: {prompt!r}, {output!r}") from None
    if not (1 <= pair[0] <= MOST and 0 <= pair[1] <= MOST):
        raise ValueError(f"line {line}: not two numbers of tokens up to {MOST:,}: {pair[0]}, {pair[1]}")
    return pair[0], max(1, pair[1])


def with_lengths(load: OpenLoop | ClosedLoop, pairs: Sequence[Pair], seed: int) -> OpenLoop | ClosedLoop:
    """The same requests at the same times, each as long as a row of the table that is drawn for it."""
    source = Random(f"{seed}/table")
    return replace(load, requests=[_as_long_as(request, source.choice(pairs)) for request in load.requests])


def _as_long_as(request: PlannedRequest, pair: Pair) -> PlannedRequest:
    prompt = request.prompt
    assert isinstance(prompt, RandomPrompt)  # drawn ones are
    shared = prompt.block_tokens if prompt.blocks else 0
    return replace(request, prompt=replace(prompt, tokens=pair[0] + shared), output_tokens=pair[1])
