"""What a server can promise, by its measured cost: told when it starts, and to whoever asks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scheduler.search import largest
from scheduler.slo import LONGEST_PROMISE_S, Promise, PromiseBook
from scheduler.solver import Load, Solver, Targets

STREAMS = (1, 8, 32)
TYPICAL_STREAMS, TYPICAL_CONTEXT = 8, 512
LENGTHS = (128, 512, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of that many tokens among the typical streams: what is promised, what it takes, and whether a chunk size
    exists that keeps the promise to it and to the streams. Times in milliseconds."""

    prompt_tokens: int
    promised_ttft_ms: float
    ttft_ms: float
    chunk_tokens: int
    feasible: bool


@dataclass(frozen=True, slots=True)
class WaysOut:
    """Each by itself, for the first prompt length that misses; None where that alone cannot help."""

    prompt_tokens: int
    binding: str
    tpot_ms: float | None
    ttft_ms: float | None
    decodes: int | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """`smallest_tpot_ms` by number of streams, the default promise's pace, and TTFT by prompt length. `longest_prompt`
    is the longest one whose default promise can be kept among the typical streams; 0 where none can. `separated`:
    prompts are alone on a prefill group, and the streams on a decode group."""

    smallest_tpot_ms: dict[int, float]
    tpot_ms: float
    tbt_ms: float | None
    ttft: tuple[Row, ...]
    longest_prompt: int
    ways_out: WaysOut | None
    separated: bool = False

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["smallest_tpot_ms"] = {str(streams): value for streams, value in self.smallest_tpot_ms.items()}
        return {**found, "feasible": self.ways_out is None}


def outlook(
    solver: Solver,
    promises: PromiseBook,
    max_model_len: int,
    max_running: int,
    streams_solver: Solver | None = None,
) -> Outlook:
    """Asked of the solver, for the default promise, among 8 streams of context 512. With a `streams_solver` those are
    in another group, which it is asked about, and prompts are among prompts alone."""
    context = min(TYPICAL_CONTEXT, max_model_len)
    streams = 0 if streams_solver is not None else min(TYPICAL_STREAMS, max_running)
    default = promises.promise(1)

    def promised(prompt: int) -> Promise:
        """To a prompt, and to the streams that have to wait for its chunks: none where they are in another group."""
        promise = promises.promise(prompt)
        return Promise(promise.ttft_s, LONGEST_PROMISE_S) if streams_solver is not None else promise

    apart = None if streams_solver is None else _pace_apart(streams_solver, default, context, max_running)

    def feasible(prompt: int) -> bool:
        return apart is None and _feasible(solver, Load(prompt, streams, context), promised(prompt))

    lengths = [length for length in LENGTHS if length < max_model_len]
    rows = tuple(
        _row(solver, Load(length, streams, context), promised(length), feasible(length)) for length in lengths or [1]
    )
    missed = next((row.prompt_tokens for row in rows if not row.feasible), None)
    ways_out = apart
    if apart is None and missed is not None:
        ways_out = _ways_out(solver, Load(missed, streams, context), promised(missed))
    return Outlook(
        smallest_tpot_ms={
            count: _ms((streams_solver or solver).step(Load(1, count, context)))
            for count in STREAMS
            if count <= max_running
        },
        tpot_ms=_ms(default.tpot_s),
        tbt_ms=None if default.tbt_s is None else _ms(default.tbt_s),
        ttft=rows,
        longest_prompt=largest(lambda prompt: prompt == 0 or feasible(prompt), max_model_len - 1),
        ways_out=ways_out,
        separated=streams_solver is not None,
    )


def describe(found: Outlook) -> dict[str, str]:
    """Lines for a person, by what they are about."""
    smallest = ", ".join(f"{value:.0f} ms at {count}" for count, value in found.smallest_tpot_ms.items())
    gap = "" if found.tbt_ms is None else f", no gap above {found.tbt_ms:.0f} ms"
    rows = "; ".join(
        f"{row.promised_ttft_ms:,.0f} ms for {row.prompt_tokens:,} tokens (takes {row.ttft_ms:,.0f}"
        f"{'' if row.feasible else ', MISSED'})"
        for row in found.ttft
    )
    lines = {
        "fastest": f"TPOT {smallest} streams",
        "promises": f"TPOT {found.tpot_ms:.0f} ms{gap}; TTFT {rows}",
    }
    if found.ways_out is not None:
        lines["verdict"] = _verdict(found.ways_out, found)
    return lines


def _verdict(out: WaysOut, found: Outlook) -> str:
    ways = [
        *([f"a TPOT of {out.tpot_ms:,.0f} ms"] if out.tpot_ms is not None else []),
        *([f"a TTFT of {out.ttft_ms:,.0f} ms"] if out.ttft_ms is not None else []),
        *([f"at most {out.decodes} streams"] if out.decodes is not None else []),
    ]
    reach = f"kept up to {found.longest_prompt:,} prompt tokens" if found.longest_prompt else "never kept"
    where = f"among {TYPICAL_STREAMS} streams"
    if found.separated:
        of_streams = f"by a decode group with {TYPICAL_STREAMS} streams"
        where = of_streams if out.binding == "tpot" else "of a prompt that is alone on a prefill group"
    concerned = "" if found.separated and out.binding == "tpot" else f" for {out.prompt_tokens:,}"
    way_out = f"; what would do{concerned}: {', or '.join(ways)}" if ways else ""
    return f"the default promise is {reach} {where} ({out.binding} binds){way_out}"


def _pace_apart(solver: Solver, promise: Promise, context: int, max_running: int) -> WaysOut | None:
    """Where streams alone in their group are slower than promised, whatever becomes of prompts: what would do."""

    def step(streams: int) -> float:
        return solver.step(Load(1, streams, context))

    typical = min(TYPICAL_STREAMS, max_running)
    if step(typical) <= promise.pace_s:
        return None
    most = largest(lambda streams: streams == 0 or step(streams) <= promise.pace_s, typical)
    return WaysOut(1, "tpot", _ms(step(typical)), None, most or None)


def _row(solver: Solver, load: Load, promise: Promise, feasible: bool) -> Row:
    chunk = max(1, solver.largest_chunk(load, promise.pace_s))
    return Row(
        prompt_tokens=load.prompt,
        promised_ttft_ms=_ms(promise.ttft_s),
        ttft_ms=_ms(solver.prefill(load, chunk)),
        chunk_tokens=chunk,
        feasible=feasible,
    )


def _feasible(solver: Solver, load: Load, promise: Promise) -> bool:
    return solver.feasible(load, Targets(promise.ttft_s, promise.pace_s))


def _ways_out(solver: Solver, load: Load, promise: Promise) -> WaysOut:
    targets = Targets(promise.ttft_s, promise.pace_s)
    ttft = solver.relaxed_ttft(load, targets)
    tpot = solver.relaxed_tpot(load, targets) if load.decodes else None
    return WaysOut(
        prompt_tokens=load.prompt,
        binding=solver.solve(load, targets).binding,
        tpot_ms=None if tpot is None else _ms(tpot),
        ttft_ms=None if ttft is None else _ms(ttft),
        decodes=solver.most_decodes(load, targets) if load.decodes else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
