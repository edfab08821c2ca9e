"""Niyama's setting (ASPLOS 2026), as far as one class of requests goes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.publications.held import capacity_of, engine, machine_of, told, ways, with_ratios
from benchmarks.publications.loads import by_rate, drawn, lengths_of
from benchmarks.publications.options import Options, Row
from cluster.simulated.capacity import Criterion


def niyama(options: Options) -> Iterator[Row]:
    """One A100, Llama-3-8B, TTFT 6 s and TPOT 50 ms for 99 % of the requests, Poisson arrivals."""
    loads = {
        "conversation": lengths_of(options.conversation) or drawn("lognormal:1020:0.9", "lognormal:129:0.9", 16384),
        "code": lengths_of(options.code) or drawn("lognormal:1500:0.9", "lognormal:13:0.8", 16384),
    }
    for name, pairs in loads.items():
        found = []
        for way, policy, chunk in ways((256, 512)):
            config = engine("Llama-3.1-8B", policy, chunk_size=chunk, ttft_ms=6000, tpot_ms=50, max_running=256)
            held = capacity_of(config, machine_of(config), by_rate(pairs, options), Criterion(0.99), options.seeds)
            found.append({"lengths": name, "policy": way, **told(held)})
        yield from with_ratios(found, "chunked 256")
