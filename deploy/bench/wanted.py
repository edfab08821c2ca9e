"""The workload that a command line asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cluster.workloads import (
    ClosedLoop,
    Lengths,
    OpenLoop,
    PlannedRequest,
    Workload,
    each_gamma,
    each_ramp,
    each_request,
    interference,
    parse_lengths,
    read_trace,
    replay,
)

_LENGTHS = {"prompt_tokens", "output_tokens"}
_DRAWN = {*_LENGTHS, "shared_prefix"}
TAKES = {
    "poisson": {"rate", "duration", *_DRAWN},
    "gamma": {"rate", "duration", "burstiness", *_DRAWN},
    "ramp": {"rate", "duration", *_DRAWN},
    "concurrency": {"concurrency", "requests", *_DRAWN},
    "interference": {"streams", "long", *_LENGTHS},
    "trace": {"trace", "duration", "rate_scale", "length_scale", "max_requests", "max_prompt", "max_output"},
}
"""Which options each workload has. One that it has not is refused, for it would be without effect."""
STREAMED = ("poisson", "gamma", "ramp")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options as given, None where one was not."""

    rate: str | None = None
    duration: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    streams: int | None = None
    long: int | None = None
    trace: Path | None = None
    rate_scale: float | None = None
    length_scale: float | None = None
    max_requests: int | None = None
    max_prompt: int | None = None
    max_output: int | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: int | None = None


def plan_of(name: str, wanted: Wanted, seed: int) -> Workload:
    """Raises ValueError, its words fit for a person who typed the options."""
    if name not in TAKES:
        raise ValueError(f"--workload is one of {', '.join(TAKES)}, not {name!r}")
    _check_options(name, wanted)
    if name == "trace":
        return _trace(wanted, seed)
    if name == "interference":
        return _interference(wanted, seed)
    if name == "concurrency":
        return ClosedLoop(list(_drawn([0.0] * (wanted.requests or 64), wanted, seed)), wanted.concurrency or 8)
    plans = list(stream_of(name, wanted, seed))
    if not plans:
        raise ValueError("no request comes in that time at that rate; raise --rate or --duration")
    return OpenLoop(plans)


def stream_of(name: str, wanted: Wanted, seed: int) -> Iterator[PlannedRequest]:
    """The requests of an open loop that is drawn, each made when it is asked for. Raises ValueError at once, its words
    fit for a person who typed the options."""
    if name not in STREAMED:
        raise ValueError(f"a {name} load is known as a whole; those that are drawn are {', '.join(STREAMED)}")
    _check_options(name, wanted)
    return _drawn(_times(name, wanted, seed), wanted, seed)


def _check_options(name: str, wanted: Wanted) -> None:
    for field in fields(wanted):
        if getattr(wanted, field.name) is not None and field.name not in TAKES[name]:
            raise ValueError(f"--{field.name.replace('_', '-')} has no meaning for --workload {name}")


def description(name: str, wanted: Wanted, seed: int) -> dict[str, Any]:
    """The options that were given, to be kept with the figures."""
    given = {field.name: getattr(wanted, field.name) for field in fields(wanted)}
    named = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    return {"workload": name, "seed": seed, **{key: value for key, value in named.items() if value is not None}}


def _times(name: str, wanted: Wanted, seed: int) -> Iterator[float]:
    duration = 30.0 if wanted.duration is None else wanted.duration
    if name == "ramp":
        first, last = _rates("1:4" if wanted.rate is None else wanted.rate)
        return each_ramp(first, last, duration, seed)
    rate = _number("1" if wanted.rate is None else wanted.rate)
    gaps = 0.5 if wanted.burstiness is None else wanted.burstiness
    return each_gamma(rate, gaps if name == "gamma" else 1.0, duration, seed)


def _rates(text: str) -> tuple[float, float]:
    first, colon, last = text.partition(":")
    if not colon:
        raise ValueError(f"--rate: a ramp goes from one rate to another, such as 1:8, got {text!r}")
    return _number(first), _number(last)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rate: not a number of requests a second: {text!r}") from None


def _drawn(times: Iterable[float], wanted: Wanted, seed: int) -> Iterator[PlannedRequest]:
    return each_request(
        times,
        _lengths("--prompt-tokens", wanted.prompt_tokens or "256"),
        _lengths("--output-tokens", wanted.output_tokens or "64"),
        seed=seed,
        shared_prefix=wanted.shared_prefix or 0,
    )


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _interference(wanted: Wanted, seed: int) -> Workload:
    return interference(
        wanted.streams or 8,
        wanted.long or 2048,
        prompt_lengths=_lengths("--prompt-tokens", wanted.prompt_tokens or "16"),
        output_lengths=_lengths("--output-tokens", wanted.output_tokens or "1024"),
        seed=seed,
    )


def _trace(wanted: Wanted, seed: int) -> Workload:
    if wanted.trace is None:
        raise ValueError("--workload trace needs --trace FILE")
    whole = replay(
        read_trace(wanted.trace, wanted.max_requests),
        rate_scale=1.0 if wanted.rate_scale is None else wanted.rate_scale,
        length_scale=1.0 if wanted.length_scale is None else wanted.length_scale,
        max_prompt=wanted.max_prompt,
        max_output=wanted.max_output,
        seed=seed,
    )
    if wanted.duration is None:
        return whole
    return OpenLoop([plan for plan in whole.requests if plan.at_s < wanted.duration])
