"""Loads of publications: lengths by what is known of their distribution, or from a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from benchmarks.publications.options import Options
from cluster.workloads import Fixed, OpenLoop, parse_lengths, poisson, read_trace, requests
from deploy.simulation.lengths import Pair, with_lengths

PAIRS = 20_000
"""Lengths that a distribution is represented by."""
Load = Callable[[float, int], OpenLoop]
"""At a rate (requests a second) with a seed."""


def drawn(prompt: str, output: str, most: int) -> list[Pair]:
    """Pairs of lengths, those that together exceed `most` tokens drawn anew."""
    source = Random(f"{prompt}/{output}")
    prompts, outputs = parse_lengths(prompt), parse_lengths(output)
    pairs: list[Pair] = []
    while len(pairs) < PAIRS:
        pair = prompts.draw(source), outputs.draw(source)
        if sum(pair) <= most:
            pairs.append(pair)
    return pairs


def sharegpt(most: int = 8192) -> list[Pair]:
    """Median and 90th percentile as Sarathi-Serve has them for ShareGPT: 1,730 and 5,696, outputs 415 and 834."""
    return drawn("lognormal:1730:0.93", "lognormal:415:0.545", most)


def arriving(pairs: Sequence[Pair], rate: float, duration: float, seed: int) -> OpenLoop:
    load = OpenLoop(requests(poisson(rate, duration, seed), Fixed(1), Fixed(1), seed=seed))
    drawn_load = with_lengths(load, pairs, seed)
    assert isinstance(drawn_load, OpenLoop)
    return drawn_load


def by_rate(pairs: Sequence[Pair], options: Options) -> Load:
    """Lasting as long as asked, or as it takes for a few requests."""
    return lambda rate, seed: arriving(pairs, rate, max(options.duration, 50 / rate), seed)


def lengths_of(path: Path | None) -> list[Pair]:
    """Of a trace; none where there is none."""
    return [] if path is None else [(row.prompt_tokens, row.output_tokens) for row in read_trace(path)]
