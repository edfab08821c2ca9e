"""A JSON schema as it is handed to what generates by it: what that would read otherwise than the schema means it is
refused, and what says nothing, or says it in an unusual way, is put plainly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_LARGEST = 2**53
"""Beyond it not every integer is a double, which is what numbers of a schema become."""
_MOST_TENS = 22
"""10 to this power is a double; with digits that are one, what is read is the nearest to what was written."""

_VALUES = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
"""Keywords that say which values there are."""
_COUNTS = frozenset(
    {f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
)
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose keys are names, and no keywords."""
_REMARKS = frozenset({"default", "examples", "example"})
"""Keywords that demand nothing."""
_SETS = re.compile(r"&&|--|~~")
"""What is an operation of sets within a character class for the engine, and two characters in ECMA-262."""


def plain(schema: Any) -> Any:
    """The same schema. Raises ValueError for what would not be kept to, and RecursionError."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "uniqueItems" and value is False:
            continue
        if key in _REMARKS:
            found[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            if key == "patternProperties":
                for pattern in value:
                    _check_pattern(pattern)
            found[key] = {name: plain(each) for name, each in value.items()}
        else:
            found[key] = _of_keyword(key, value)
    return found


def _of_keyword(key: str, value: Any) -> Any:
    if key in _VALUES:
        for number in _numbers(value):
            _check_number(key, number)
        return value
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "pattern" and isinstance(value, str):
        _check_pattern(value)
        return value
    return plain(value)


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _check_number(key: str, number: int | float) -> None:
    exact = abs(number) <= _LARGEST
    if exact and isinstance(number, float):
        _, digits, exponent = Decimal(repr(number)).as_tuple()
        exact = int("".join(map(str, digits))) <= _LARGEST and abs(int(exponent)) <= _MOST_TENS
    if not exact:
        allowed = f"within 2^53, of up to 15 digits and {_MOST_TENS} decimal places"
        raise ValueError(f"{key}: only numbers {allowed} can be kept to exactly, not {number!r}")


def _check_pattern(pattern: str) -> None:
    """Its character classes are what ECMA-262 takes them to be, and mean that to the engine."""
    inside, at = False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif not inside:
            inside = character == "["
            if inside and pattern[at + 1 :].startswith(("]", "^]")):
                raise ValueError(f"pattern: {pattern!r} has a character class with nothing in it")
        elif character == "]":
            inside = False
        elif character == "[":
            raise ValueError(f"pattern: {pattern!r} has [ in a character class, where it is to be written \\[")
        elif operation := _SETS.match(pattern, at):
            raise ValueError(f"pattern: {pattern!r} has {operation[0]} in a character class; write its characters once")
        at += 1
