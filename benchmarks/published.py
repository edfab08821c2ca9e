"""What others published about schedulers, done again on the simulated cluster; `docs/fidelity.md` says why it differs.

    python -m benchmarks.published [ITEM ...] [--seeds N] [--duration S] [--json]

ITEM is `ablation`, `capacity`, `tile`, `distserve`, `niyama`, `classes`, `mooncake`, `bound` or `forward`; without one,
all that need no file. `--conversation`, `--code` (Azure, CSV) and `--mooncake-trace` (JSON lines) give traces; without
them lengths are drawn from distributions with about the published medians, and `mooncake` and `bound` are left out. The
same seed gives the same figures. Each item takes seconds to a few minutes on one core; as docs/fidelity.md calls them,
`mooncake` takes eight and `classes` twenty.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.publications.bound import bound
from benchmarks.publications.classes import classes
from benchmarks.publications.distserve import distserve
from benchmarks.publications.forwards import forward, tile
from benchmarks.publications.mooncake import mooncake
from benchmarks.publications.niyama import niyama
from benchmarks.publications.options import Options, Row
from benchmarks.publications.sarathi import ablation, capacities

ITEMS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "tile": tile,
    "forward": forward,
    "ablation": ablation,
    "capacity": capacities,
    "distserve": distserve,
    "niyama": niyama,
    "classes": classes,
    "mooncake": mooncake,
    "bound": bound,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="ITEM")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--duration", type=float, default=200.0, help="seconds of arrivals")
    parser.add_argument("--rows", type=int, default=500, help="of a trace, at most")
    for name in ("conversation", "code", "mooncake-trace"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    items, as_json = given.pop("items"), given.pop("json")
    options = Options(**given)
    if options.seeds < 1 or options.duration <= 0 or options.rows < 50:
        parser.exit(2, "--seeds is at least 1, --duration above 0, --rows at least 50\n")
    if unknown := [item for item in items if item not in ITEMS]:
        parser.exit(2, f"unknown item {unknown[0]!r}; known: {', '.join(ITEMS)}\n")
    names = items or [name for name in ITEMS if name != "mooncake" or options.mooncake_trace]
    try:
        for name in names:
            _show(name, ITEMS[name](options), as_json)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


def _show(name: str, rows: Iterable[Row], as_json: bool) -> None:
    """Each row as soon as it is there."""
    for row in rows:
        text = ", ".join(f"{key}: {value}" for key, value in row.items())
        print(json.dumps({"item": name, **row}) if as_json else f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main()
