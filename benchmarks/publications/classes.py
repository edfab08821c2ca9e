"""Niyama's three classes at once (ASPLOS 2026): an interactive one, and two that want their last token in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.publications.held import capacity_of, engine, machine_of, served, told, with_ratios
from benchmarks.publications.loads import Load, by_rate, drawn, lengths_of
from benchmarks.publications.options import Options, Row
from cluster.config import EngineConfig, SloPromise
from cluster.simulated.capacity import Criterion
from cluster.simulated.seen import SeenRequest, Simulation

INTERACTIVE = "interactive"
LAST_TOKEN_S = {"soon": 600.0, "later": 1800.0}
"""From arrival to the last token. Our promises are of a first token and a pace: most of the time until the first, and
the rest for a thousand tokens, which nearly all answers of the traces have less than."""
CLASSES = (INTERACTIVE, *LAST_TOKEN_S)
KEPT = 0.99


@dataclass(frozen=True, slots=True)
class EachClass(Criterion):
    """What is to hold is the share of each class by itself."""

    def broken(self, run: Simulation) -> str:
        shares = kept_by_class(run)
        worst = min(shares, key=shares.__getitem__)
        return f"{worst}: {shares[worst]:.1%} kept" if shares[worst] < KEPT else ""


def in_time(seen: SeenRequest) -> bool:
    within = LAST_TOKEN_S.get(seen.planned.kind)
    if within is None:
        return seen.met
    fine = seen.refused is None and seen.lost is None and seen.ended is not None
    return fine and seen.ended is not None and seen.ended - seen.arrival <= within


def kept_by_class(run: Simulation) -> dict[str, float]:
    """Of the classes that there are."""
    found: dict[str, list[bool]] = {}
    for seen in run.requests:
        found.setdefault(seen.planned.kind, []).append(in_time(seen))
    return {name: sum(found[name]) / len(found[name]) for name in CLASSES if name in found}


def classes(options: Options) -> Iterator[Row]:
    """One A100, Llama-3-8B, a third of the requests of each class: capacity with 99 % of each class in time, and what
    becomes of each class at rates beyond that of chunks of 256."""
    loads = {
        "conversation": lengths_of(options.conversation) or drawn("lognormal:1020:0.9", "lognormal:129:0.9", 16384),
        "code": lengths_of(options.code) or drawn("lognormal:1500:0.9", "lognormal:13:0.8", 16384),
    }
    for name, pairs in loads.items():
        mixed = _mixed(by_rate(pairs, options))
        ways = (("chunked 256", "chunked", 256), ("chunked 2048", "chunked", 2048), ("slo", "slo", 512))
        found = [
            {"lengths": name, "policy": way, **_capacity(_config(policy, chunk), mixed, options)}
            for way, policy, chunk in ways
        ]
        alone = _capacity(_config("chunked", 256), _only(mixed, INTERACTIVE), options)["rate"]
        others = _capacity(_config("chunked", 2048), _only(mixed, *LAST_TOKEN_S), options)["rate"]
        apart = round(3 / (1 / alone + 2 / others), 3) if alone and others else 0.0
        found.append({"lengths": name, "policy": "chunked, a GPU for each kind", "rate": apart})
        yield from with_ratios(found, "chunked 256")
        base = found[0]["rate"] or 1.0
        for times in (1.0, 1.25, 1.5, 2.0):
            for way, policy, chunk in ways:
                config = _config(policy, chunk)
                run = served(config, machine_of(config), mixed(times * base, 0))
                shares = {kind: f"{100 * share:.1f} %" for kind, share in kept_by_class(run).items()}
                yield {"lengths": name, "rate": round(times * base, 2), "policy": way, **shares}


def _config(policy: str, chunk: int) -> EngineConfig:
    wide: dict[str, Any] = {"max_running": 256, "max_queued_requests": 1 << 20, "max_queued_tokens": 1 << 30}
    promised = {
        kind: SloPromise(ttft_ms=700 * seconds, tpot_ms=0.3 * seconds) for kind, seconds in LAST_TOKEN_S.items()
    }
    return engine("Llama-3.1-8B", policy, chunk_size=chunk, ttft_ms=6000, tpot_ms=50, slo_classes=promised, **wide)


def _mixed(load: Load) -> Load:
    """The same requests, each of a class that is drawn for it."""

    def of_classes(rate: float, seed: int) -> Any:
        plain, source = load(rate, seed), Random(f"{seed}/classes")
        kinds = [source.choice(CLASSES) for _ in plain.requests]
        asked = [
            replace(request, kind=kind, extra={} if kind == INTERACTIVE else {"slo": kind})
            for request, kind in zip(plain.requests, kinds, strict=True)
        ]
        return replace(plain, requests=asked)

    return of_classes


def _only(load: Load, *kinds: str) -> Load:
    """Those of some classes, as many a second as asked."""

    def some(rate: float, seed: int) -> Any:
        mixed = load(rate * len(CLASSES) / len(kinds), seed)
        return replace(mixed, requests=[request for request in mixed.requests if request.kind in kinds])

    return some


def _capacity(config: EngineConfig, load: Load, options: Options) -> Row:
    return told(capacity_of(config, machine_of(config), load, EachClass(delay_s=0.0), options.seeds))
