"""The load that a command line asks for, at any rate and with any seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cluster.simulated.capacity import FEWEST
from cluster.workloads import Interference, OpenLoop, PlannedRequest, Workload
from deploy.bench.wanted import STREAMED, Wanted, plan_of, stream_of
from deploy.simulation.lengths import Pair, with_lengths

WORKLOADS = ("poisson", "gamma", "fixed", "ramp", "trace", "concurrency", "interference")
STEADY = 1e9
"""A burstiness at which gaps do not differ any more."""
SEARCHED = ("poisson", "gamma", "fixed", "trace")
"""Workloads that have one rate, which a search can change."""


def load_of(name: str, wanted: Wanted, seed: int, table: Sequence[Pair] = ()) -> Workload:
    """Lengths are drawn from the `table` where there is one. Raises ValueError, its words fit for a person who typed
    the options."""
    name, wanted = _drawn_as(name, wanted)
    planned = plan_of(name, wanted, seed)
    if not table:
        return planned
    if isinstance(planned, Interference):
        raise ValueError("--lengths has no meaning for --workload interference")
    if name == "trace" or wanted.prompt_tokens is not None or wanted.output_tokens is not None:
        raise ValueError("--lengths gives both lengths; it goes with no trace, --prompt-tokens or --output-tokens")
    return with_lengths(planned, table, seed)


def stream_of_load(name: str, wanted: Wanted, seed: int, table: Sequence[Pair] = ()) -> Iterator[PlannedRequest]:
    """The same, each request made when it is due. Raises ValueError, its words fit for a person who typed the options,
    also for a load that is known as a whole."""
    if table:
        raise ValueError("--totals goes with no --lengths")
    name, wanted = _drawn_as(name, wanted)
    if name not in STREAMED:
        raise ValueError(f"--totals needs a load that is drawn as it comes: {', '.join(('fixed', *STREAMED))}")
    return stream_of(name, wanted, seed)


def _drawn_as(name: str, wanted: Wanted) -> tuple[str, Wanted]:
    """The load test's workload that this one is."""
    if name not in WORKLOADS:
        raise ValueError(f"--workload is one of {', '.join(WORKLOADS)}, not {name!r}")
    if name != "fixed":
        return name, wanted
    if wanted.burstiness is not None:
        raise ValueError("--burstiness has no meaning for --workload fixed")
    return "gamma", replace(wanted, burstiness=STEADY)


def load_by_rate(
    name: str, wanted: Wanted, duration: float, table: Sequence[Pair] = ()
) -> Callable[[float, int], OpenLoop]:
    """The load at a rate (requests a second) with a seed, as long as asked or as it takes for a few requests."""
    if name not in SEARCHED:
        raise ValueError(f"--find-capacity needs a workload with one rate: {', '.join(SEARCHED)}")
    if wanted.rate is not None or wanted.rate_scale is not None:
        raise ValueError("--find-capacity looks for the rate itself; leave out --rate and --rate-scale")
    if name == "trace" and not table:
        return _trace_by_rate(wanted)

    def drawn(rate: float, seed: int) -> OpenLoop:
        lasting = replace(wanted, rate=repr(rate), duration=max(duration, FEWEST / rate))
        planned = load_of(name, lasting, seed, table)
        assert isinstance(planned, OpenLoop)  # all that are searched are
        return planned

    return drawn


def _trace_by_rate(wanted: Wanted) -> Callable[[float, int], OpenLoop]:
    """The whole trace, faster or slower: its bursts stay as they are. Seeds change nothing but what prompts say."""
    planned = plan_of("trace", wanted, 0)
    assert isinstance(planned, OpenLoop)  # traces are
    lasts = planned.requests[-1].at_s
    if len(planned.requests) < FEWEST or lasts <= 0:
        raise ValueError(f"the trace has too few requests to search with: {len(planned.requests)} in {lasts:g} s")
    own_rate = len(planned.requests) / lasts

    def scaled(rate: float, seed: int) -> OpenLoop:
        return OpenLoop([replace(request, at_s=request.at_s * own_rate / rate) for request in planned.requests])

    return scaled
