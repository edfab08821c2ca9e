"""All that is measured of speed on this machine, as one table with the aims beside it: `make bench`.

    python -m benchmarks.table [--rounds 3] [--peer-env NAME=DIR ...] [--json]

Each benchmark runs in a process of its own, one after another. One that fails is named with what it said last, the
others go on, and the exit code is 1. Whether an aim is missed does not change the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    measure: str
    value: str
    aim: str
    holds: bool | None
    absolute: str = ""


def forward(result: dict[str, Any]) -> list[Row]:
    return [
        Row(row["measure"], f"{row['ratio']:.3f}", row["target"], row["holds"], f"{row['ms'][0]} / {row['ms'][1]} ms")
        for row in result["rows"]
    ]


def serving(result: dict[str, Any]) -> list[Row]:
    rows = [
        Row(
            f"served decode step of {row['streams']} streams / bare",
            f"{row['ratio']:.3f}",
            f"at most {row['at_most']:g}",
            row["holds"],
            f"{row['ms']['step']} / {row['ms']['bare']} ms",
        )
        for row in result["rows"]
    ]
    idle, aim = f"{result['idle_total']:.3f}", f"at most {result['idle_at_most']:g}"
    return [*rows, Row("the idle server, share of a processor", idle, aim, result["idle_holds"])]


def ranks(result: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"communication of a step on 2 ranks, {row['way']}",
            f"{row['share']:.3f}",
            f"at most {row['at_most']:g}",
            row["holds"],
            f"{row['ms'][0]} / {row['ms'][1]} ms",
        )
        for row in result["rows"]
    ]


def start(result: dict[str, Any]) -> list[Row]:
    start_aim, memory_aim = (f"at most {result[name]:g}" for name in ("start_at_most_s", "memory_at_most"))
    seconds, memory = str(result["start_s"]), str(result["memory"])
    resident = (
        f"{result['resident_mib']} / {result['held_mib']} MiB; with {result['held_small_mib']} {result['memory_small']}"
    )
    return [
        Row("start to first token, s", seconds, start_aim, result["start_holds"]),
        Row("worker's memory / (weights + KV)", memory, memory_aim, result["memory_holds"], resident),
    ]


def beside_peers(result: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"{r['measure']}: ours / {r['engine']}",
            f"{r['ours_to_it']}",
            r["target"] or "",
            r["holds"],
            f"{r['value']}",
        )
        for r in result["rows"]
        if r["engine"] != "stallfree"
    ]


BENCHMARKS = (
    ("forward", forward),
    ("serving_cost", serving),
    ("tensor_parallel", ranks),
    ("start", start),
)


def run(name: str, *options: str) -> dict[str, Any]:
    """Raises RuntimeError with the last of what it said."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"benchmarks.{name} failed: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def machine() -> str:
    return f"{os.cpu_count()} processors, {platform.processor() or platform.machine()}, {platform.system()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, failures = [], []
    wanted: list[tuple[str, Callable[[dict[str, Any]], list[Row]], list[str]]] = [
        (name, read, []) for name, read in BENCHMARKS
    ]
    if arguments.peer_env:
        peers = [option for pair in arguments.peer_env for option in ("--peer-env", pair)]
        wanted.append(("peers", beside_peers, peers))
    for name, read, options in wanted:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += read(run(name, "--rounds", str(arguments.rounds), *options))
        except RuntimeError as error:
            failures.append(str(error))
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows], "failures": failures}, indent=2))
    else:
        print(f"{machine()}; medians of {arguments.rounds} rounds\n")
        for row in rows:
            verdict = "MISSED" if row.holds is False else ""
            print(f"{row.measure:<60}{row.value:>8}  {row.aim:<14}{verdict:<8}{row.absolute}")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
