"""What no schedule of fused iterations can carry: how fast a trace may come before its GPU is too small for it; and
what it would help `slo` to know in advance whom to give up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.publications.held import A100, engine, machine_of, served
from benchmarks.publications.options import Options, Row
from cluster.workloads import TraceRow, read_trace, replay
from scheduler.roofline import Features, Roofline, smooth_max
from scheduler.shapes import known_shape

MODEL = "Llama-3.1-8B"
COST = Roofline(known_shape(MODEL), A100)
TTFT_S, TPOT_S, KEPT = 2.0, 0.05, 0.9
ROWS = 1500
RATES = (8.0, 8.5, 9.0)
"""Requests a second at which it is looked at what those who are given up cost."""
STARTS, ENDS = 50, 25
"""A moment to begin with at every so many arrivals, and to end with at every so many deadlines."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes, however its prompt is cut: tokens that pass through the matrices, and seconds of attention.
    `done_by` is the latest moment of its last token, from its arrival."""

    tokens: int
    attention_s: float
    done_by: float

    @classmethod
    def of(cls, row: TraceRow) -> Demand:
        prompt, answer = row.prompt_tokens, row.output_tokens
        pairs = prompt * (prompt + 1) // 2
        contexts = (answer - 1) * prompt + (answer - 1) * answer // 2
        features = Features(prompt, answer - 1, contexts, chunk_pairs=pairs)  # nothing computed in vain
        attention = COST.terms(features).attention_s
        return cls(prompt + answer - 1, attention, TTFT_S + (answer - 1) * TPOT_S)


def bound(options: Options) -> Iterator[Row]:
    """For the first rows of Azure's traces, the rate above which 90 % of the requests cannot be in time, and what such
    requests could come at for ever: all of them, and only the nine tenths that take the least."""
    for name, path in (("conversation", options.conversation), ("code", options.code)):
        if path is not None:
            rows = read_trace(path, ROWS)
            ever = {f"for ever, {share:.0%} served": round(sustained(rows, share), 2) for share in (1.0, KEPT)}
            yield {"trace": name, "rows": len(rows), "no more than": round(highest(rows), 2), **ever}
    if options.conversation is not None:
        rows = read_trace(options.conversation, ROWS)
        yield from ({"trace": "conversation", "rate": rate, **without_the_largest(rows, rate)} for rate in RATES)


def without_the_largest(rows: Sequence[TraceRow], rate: float) -> Row:
    """Shares of all requests that `slo` serves in time: as they come, where the tenth that takes most is known before
    and never comes, and where matrices have no tiles besides."""
    sizes = [_alone(of.tokens, of.attention_s) for of in map(Demand.of, rows)]
    too_large = sorted(sizes)[int(KEPT * len(rows))]
    others = [row for row, size in zip(rows, sizes, strict=True) if size < too_large]
    config = engine(MODEL, "slo", max_running=256, ttft_ms=1e3 * TTFT_S, tpot_ms=1e3 * TPOT_S)
    machine, faster = machine_of(config), rate * (rows[-1].at_s - rows[0].at_s) / len(rows)
    smooth = replace(machine, cost=Roofline(known_shape(MODEL), replace(A100, tile=1)))
    cases = {
        "in time": (machine, rows),
        "without the largest tenth": (machine, others),
        "and without tiles": (smooth, others),
    }
    return {
        name: round(sum(of.met for of in served(config, on, replay(those, rate_scale=faster)).requests) / len(rows), 3)
        for name, (on, those) in cases.items()
    }


def highest(rows: Sequence[TraceRow]) -> float:
    """Requests a second, by bisection over how much faster the trace is run."""
    lasts = rows[-1].at_s - rows[0].at_s
    return _bisected(lambda rate: fits(rows, rate * lasts / len(rows)))


def sustained(rows: Sequence[TraceRow], share: float) -> float:
    """Requests a second that come, of which those that take the least are served."""
    demands = sorted((_alone(of.tokens, of.attention_s), of.tokens, of.attention_s) for of in map(Demand.of, rows))
    served = demands[: int(share * len(demands))]
    tokens, attention = (sum(of[column] for of in served) / len(demands) for column in (1, 2))
    return _bisected(lambda rate: rate * attention + _matrices_s(rate * tokens * TPOT_S) / TPOT_S <= 1)


def _bisected(holds: Callable[[float], bool]) -> float:
    low, high = 0.0, 1000.0
    while high - low > 0.005:
        rate = (low + high) / 2
        low, high = (rate, high) if holds(rate) else (low, rate)
    return low


def fits(rows: Sequence[TraceRow], faster: float) -> bool:
    """Whether between any two moments the GPU had time for all that came after the one and had to be done by the other,
    but for the tenth of all requests that take the most of it: a schedule that is in time has that, and one that has it
    may still be late."""
    demands = [(row.at_s / faster, Demand.of(row)) for row in rows]
    spared = int((1 - KEPT) * len(rows) + 1e-9)
    for start in range(0, len(demands) - spared, STARTS):
        begins = demands[start][0]
        due = sorted((at_s + of.done_by, of.tokens, of.attention_s) for at_s, of in demands[start:])
        for count in range(spared + 1, len(due) + 1, ENDS):
            within = due[count - 1][0] - begins
            if least_s([(tokens, attention) for _, tokens, attention in due[:count]], spared, within) > within:
                return False
    return True


def least_s(demands: Sequence[tuple[int, float]], spared: int, within: float) -> float:
    """Seconds that all but the `spared` largest demands take in iterations that streams allow: one every TPOT, at the
    least. Linear layers are convex in an iteration's tokens, so that equal iterations take the least."""
    iterations = within / TPOT_S
    each = sorted(demands, key=lambda demand: _alone(*demand))[: len(demands) - spared]
    tokens = sum(tokens for tokens, _ in each)
    return sum(attention for _, attention in each) + iterations * _matrices_s(tokens / iterations)


def _alone(tokens: int, attention_s: float) -> float:
    """By which demands are compared: at the GPU's achieved peak."""
    return attention_s + tokens * _TOKEN_S


def _matrices_s(tokens: float) -> float:
    """Of an iteration with so many tokens, without whole tiles: what else it takes, and a smooth maximum of reading
    weights and computing."""
    read, computed = _READ_S, tokens * _TOKEN_S
    return smooth_max(read, computed, A100.norm) * (1 + A100.elementwise) + _FIXED_S


_TOKEN_S = 2.0 * COST.shape.parameters / (A100.peak_flops * A100.compute_fraction)
_READ_S = COST.shape.read_bytes / (A100.bandwidth * A100.memory_fraction)
_DECODE = COST.terms(Features(decodes=1, decode_context=1))
_FIXED_S = _DECODE.latency_s + _DECODE.overhead_s
