"""Modules that are imported when something of them is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.deferred import defer

NAME = "a_module_to_defer"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("import sys\nsys.imported_for_a_test = True\nanswer = 42\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "imported_for_a_test", False, raising=False)
    yield NAME
    sys.modules.pop(NAME, None)


def was_imported() -> bool:
    return bool(vars(sys)["imported_for_a_test"])


def test_a_deferred_module_is_imported_by_the_first_question(module: str) -> None:
    defer(module)
    placeholder = importlib.import_module(module)
    importlib.import_module(module)
    assert not hasattr(placeholder, "__file__")
    assert not was_imported()
    assert placeholder.answer == 42
    assert was_imported()
    assert sys.modules[module] is not placeholder
    assert importlib.import_module(module).answer == placeholder.answer
    with pytest.raises(AttributeError, match="question"):
        _ = placeholder.question


def test_a_module_that_is_there_stays(module: str) -> None:
    there = importlib.import_module(module)
    defer(module)
    assert importlib.import_module(module) is there


def test_a_module_that_there_is_not_is_missed_by_who_asks() -> None:
    name = "no_such_module_anywhere"
    defer(name)
    with pytest.raises(ModuleNotFoundError):
        _ = importlib.import_module(name).something
