"""From arrivals and lengths to planned requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any, ParamSpec

from cluster.workloads.lengths import Fixed, Lengths
from cluster.workloads.planned import Interference, PlannedRequest
from cluster.workloads.prompts import RandomPrompt

P = ParamSpec("P")


def each_request(
    times: Iterable[float],
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    *,
    seed: int = 0,
    shared_prefix: int = 0,
    extra: Mapping[str, Any] | None = None,
    kind: str = "request",
) -> Iterator[PlannedRequest]:
    """One request for each time, made when it is asked for. All of them begin with the same `shared_prefix` tokens,
    which come on top of the drawn length. Lengths do not depend on the times: another rate sends the same requests.
    """
    source = Random(f"{seed}/lengths/{kind}")
    for number, at_s in enumerate(times):
        yield PlannedRequest(
            prompt=_prompt(prompt_lengths.draw(source), f"{seed}/{kind}/{number}", seed, shared_prefix),
            output_tokens=output_lengths.draw(source),
            at_s=at_s,
            extra=extra or {},
            kind=kind,
        )


def _at_once(each: Callable[P, Iterator[PlannedRequest]]) -> Callable[P, list[PlannedRequest]]:
    def all_of_them(*args: P.args, **kwargs: P.kwargs) -> list[PlannedRequest]:
        return list(each(*args, **kwargs))

    return all_of_them


requests = _at_once(each_request)
"""As `each_request`, all at once."""


def interference(
    streams: int,
    long_tokens: int,
    *,
    prompt_lengths: Lengths | None = None,
    output_lengths: Lengths | None = None,
    long_output_tokens: int = 12,
    lead: int = 20,
    tail: int = 24,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> Interference:
    """`streams` of kind "stream" and one prompt of `long_tokens` of kind "long". Unless the lengths say otherwise, the
    prompt of a stream has 16 tokens and its output at most 1024: enough, that is, to outlast the long prompt."""
    running = requests(
        [0.0] * streams,
        prompt_lengths or Fixed(16),
        output_lengths or Fixed(1024),
        seed=seed,
        extra=extra,
        kind="stream",
    )
    long = requests([0.0], Fixed(long_tokens), Fixed(long_output_tokens), seed=seed, extra=extra, kind="long")
    return Interference(running, long[0], lead=lead, tail=tail)


def _prompt(tokens: int, own: str, seed: int, shared_prefix: int) -> RandomPrompt:
    if not shared_prefix:
        return RandomPrompt(tokens, own)
    return RandomPrompt(tokens + shared_prefix, own, (0,), shared_prefix, f"{seed}/shared")
