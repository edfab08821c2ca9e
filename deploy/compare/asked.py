"""One call of `stallfree compare`: what is compared under which load, from the options as given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TypeVar

from cluster.config import EngineConfig
from deploy.bench.wanted import Wanted, plan_of
from deploy.compare.comparison import Load, Plan
from deploy.compare.configuration import Configuration, Split, configurations

RATED = {"poisson": "rate", "gamma": "rate", "trace": "rate_scale"}
"""Workloads that can be sent at several rates, and the option that says how fast."""
Item = TypeVar("Item")


def plan_asked(
    base: EngineConfig,
    kinds: str,
    chunk_sizes: str,
    splits: str,
    workload: str,
    wanted: Wanted,
    rates: str | None,
    seed: int,
) -> Plan:
    """Raises ValueError, its words fit for a person who typed the options."""
    return Plan(base, _configurations(kinds, chunk_sizes, splits), loads(workload, wanted, rates, seed))


def loads(workload: str, wanted: Wanted, rates: str | None, seed: int) -> list[Load]:
    """The same requests at each of the rates, in rising order; requests/s, or for a trace times its own pace."""
    if rates is None:
        return [Load("", plan_of(workload, wanted, seed))]
    option = RATED.get(workload)
    if option is None:
        raise ValueError(f"--rates has no meaning for --workload {workload}; it is for {', '.join(RATED)}")
    if getattr(wanted, option) is not None:
        raise ValueError(f"--rates and --{option.replace('_', '-')} are both given; choose one")
    found = sorted(_items("--rates", rates, _rate))
    return [_at(workload, wanted, option, rate, seed) for rate in found]


def _at(workload: str, wanted: Wanted, option: str, rate: float, seed: int) -> Load:
    if option == "rate":
        return Load(f"{rate:g} requests/s", plan_of(workload, replace(wanted, rate=repr(rate)), seed))
    return Load(f"{rate:g} times the trace's pace", plan_of(workload, replace(wanted, rate_scale=rate), seed))


def _configurations(kinds: str, chunk_sizes: str, splits: str) -> list[Configuration]:
    sizes = _items("--chunk-sizes", chunk_sizes, _size)
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    try:
        return configurations(names, sizes, _items("--splits", splits, _split) if splits else (), median_low(sizes))
    except ValueError as error:
        raise ValueError(f"--configurations: {error}") from None


def _items(option: str, text: str, read: Callable[[str], Item]) -> list[Item]:
    parts: Sequence[str] = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{option} names nothing")
    try:
        return list(dict.fromkeys(read(part) for part in parts))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1 << 20:
        raise ValueError(f"{text!r} is no number of tokens")
    return int(text)


def _split(text: str) -> Split:
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise ValueError(f"{text!r} is no split; write prefill:decode groups, such as 1:3")
    return int(prefill), int(decode)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
