"""docs/faults.md names tests: each of them has to be there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "faults.md"
_FILE = re.compile(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)")


@cache
def functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_fault_has_tests_and_each_of_them_exists() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    faults = [row for row in rows if not row.startswith("| fault |")]
    assert len(faults) > 25
    for row in faults:
        named = [(file, name) for file, names in _FILE.findall(row) for name in re.findall(r"test_\w+", names)]
        assert named, row
        assert len(named) == len(re.findall(r"`test_\w+`", row)), "a name without its file"
        for file, name in named:
            assert name in functions(TESTS / file), f"{file} has no {name}"
