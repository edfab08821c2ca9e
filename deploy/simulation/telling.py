"""A simulation as the load test tells a run: the same records, figures and report, and what only a simulation knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.simulated.capacity import Capacity
from cluster.simulated.cheapest import Offer
from cluster.simulated.seen import SeenRequest, Simulation
from cluster.workloads import ClosedLoop, Interference, OpenLoop, Workload
from deploy.bench.record import CountedBy, Outcome, RequestRecord, RunRecord
from deploy.bench.spread import Spread
from scheduler.orders import Moved

_LOOPS = {OpenLoop: "open loop", ClosedLoop: "closed loop", Interference: "interference"}


def loop_of(workload: Workload) -> str:
    """As the load test calls it."""
    return _LOOPS[type(workload)]


def as_run(simulation: Simulation, facts: dict[str, Any]) -> RunRecord:
    """Requests as a client would have seen them that is never late and whose answers take no time on the way."""
    records = tuple(_record(request, simulation.ended) for request in simulation.requests)
    return RunRecord(
        requests=records,
        duration_s=simulation.ended,
        started_at=0.0,
        open_loop=False,  # lateness means nothing here
        planned=len(records),
        facts=facts,
    )


def _record(request: SeenRequest, ended: float) -> RequestRecord:
    error = request.refused or request.lost
    return RequestRecord(
        kind=request.planned.kind,
        due_s=request.arrival,
        sent_s=request.arrival,
        tokens=tuple(request.tokens),
        ended_s=request.arrival if request.refused else ended if request.ended is None else request.ended,
        prompt_tokens=request.prompt_tokens,
        asked_tokens=request.planned.output_tokens,
        outcome=Outcome.FAILED if error else Outcome.UNFINISHED if request.ended is None else Outcome.FINISHED,
        counted_by=CountedBy.TOKEN_IDS if request.tokens else None,
        error=error,
        left=request.left,
    )


def engine_json(simulation: Simulation, delay_s: float, wall_s: float) -> dict[str, Any]:
    """What no client sees; `delay_s` is the median of the scheduling delays."""
    iterations = simulation.iterations
    busy = iterations.busy_s / (simulation.ended * max(1, simulation.groups)) if simulation.ended else 0.0
    return {
        "gpus": simulation.gpus,
        "iterations": iterations.count,
        "mean_iteration_ms": round(iterations.busy_s / iterations.count * 1e3, 3) if iterations.count else None,
        "longest_iteration_ms": round(iterations.longest_s * 1e3, 3),
        "mean_budget_tokens": round(iterations.mean_budget, 1),
        "prefill_tokens": iterations.prefill_tokens,
        "decode_tokens": iterations.decodes,
        "preemptions": iterations.preemptions,
        "utilisation": round(busy, 4),
        "median_scheduling_delay_ms": _finite_ms(delay_s),
        "kv_transfers": _transfers_json(simulation.moved) if simulation.moved else None,
        "wall_s": round(wall_s, 3),
        "iterations_per_wall_s": round(iterations.count / wall_s) if wall_s else None,
    }


def _transfers_json(moved: Sequence[Moved]) -> dict[str, Any]:
    """Of KV between groups. `early_share`: of its bytes, those that went while their prompt was still computed."""
    total, busy = sum(move.bytes for move in moved), sum(move.send_s for move in moved)
    return {
        "count": len(moved),
        "bytes": total,
        "early_share": round(sum(move.early_bytes for move in moved) / total, 4) if total else None,
        "send_ms": Spread.of(move.send_s for move in moved).as_json(),
        "wait_ms": Spread.of(move.wait_s for move in moved).as_json(),
        "gb_per_s": round(total / busy / 1e9, 3) if busy else None,
    }


def _finite_ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if seconds < 1e9 else None


def _transfers_line(moved: dict[str, Any]) -> str:
    return (
        f"{moved['count']} transfers of KV at {moved['gb_per_s']} GB/s, {moved['early_share'] or 0:.0%} of it while a "
        f"prompt was computed; all there {moved['wait_ms']['p50']} ms after the first token (p50)"
    )


def engine_lines(told: dict[str, Any]) -> list[str]:
    """`engine_json` for a person."""
    moved = told["kv_transfers"]
    transfers = [] if moved is None else [_transfers_line(moved)]
    return [
        *transfers,
        f"{told['iterations']:,} iterations of {told['mean_iteration_ms']} ms on the average "
        f"(longest {told['longest_iteration_ms']} ms), busy {told['utilisation']:.0%} of the time",
        f"mean budget {told['mean_budget_tokens']:,} prompt tokens, {told['preemptions']} preemptions, "
        f"median scheduling delay {told['median_scheduling_delay_ms']} ms",
        f"{told['gpus']} GPUs simulated in {told['wall_s']:.1f} s: {told['iterations_per_wall_s']:,} iterations/s",
    ]


def capacity_json(found: Capacity) -> dict[str, Any]:
    return {
        "requests_per_s": round(found.rate, 4),
        "margin_95": None if found.margin is None else round(found.margin, 4),
        "seeds": [
            {
                "seed": of.seed,
                "requests_per_s": round(of.rate, 4),
                "not_at": round(of.above, 4) if of.above < 1e9 else None,
                "because": of.broken or None,
                "runs": of.runs,
            }
            for of in found.seeds
        ],
    }


def capacity_lines(found: Capacity) -> list[str]:
    spread = "" if found.margin is None else f" ± {found.margin:.3f} (95 %, {len(found.seeds)} seeds)"
    lines = [f"capacity: {found.rate:.3f} requests/s{spread}"]
    for of in found.seeds:
        at = f"holds at {of.rate:.3f}" if of.rate else "holds at no rate that was tried"
        not_at = f"; not at {of.above:.3f}: {of.broken}" if of.broken else ""
        lines.append(f"  seed {of.seed}: {at}{not_at} ({of.runs} runs)")
    return lines


def offer_json(offer: Offer, priced: bool) -> dict[str, Any]:
    return {
        "gpu": offer.kind.gpu,
        "tp": offer.kind.tp,
        "policy": offer.kind.policy,
        "groups": offer.groups,
        "gpus": offer.gpus,
        "price_per_hour": round(offer.price, 4) if priced and offer.price is not None else None,
        "attainment": None if offer.attainment is None else round(offer.attainment, 4),
        "because": offer.why,
    }


def offer_lines(offers: list[dict[str, Any]]) -> list[str]:
    lines = []
    for place, offer in enumerate(offers, 1):
        kind = f"{offer['groups'] or '-'} x {offer['tp']} {offer['gpu']}, {offer['policy']}"
        price = "" if offer["price_per_hour"] is None else f", {offer['price_per_hour']:g} an hour"
        gpus = "does not carry it" if offer["gpus"] is None else f"{offer['gpus']} GPUs{price}"
        lines.append(f"{place if offer['gpus'] else '-':>2}  {kind}: {gpus} ({offer['because']})")
    return lines
