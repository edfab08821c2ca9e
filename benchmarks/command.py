"""The command line of benchmarks that take some rounds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def run_rounds(
    about: str | None, rounds: int, measure: Callable[[int], Result], show: Callable[[Result], None]
) -> None:
    """`--rounds`, or else `rounds`, is what `measure` gets; what it found is shown, or printed as it is by `--json`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    print(json.dumps(result, indent=2)) if arguments.json else show(result)
