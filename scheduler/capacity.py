"""A verdict for a model on a GPU: the dual-SLO solver, memory, and the ways out, each with its number."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scheduler.hardware import Listed
from scheduler.roofline import ModelShape, Roofline, roofline_chunk
from scheduler.search import largest
from scheduler.solver import Load, Solver, Targets, Verdict

MEMORY_SHARE = 0.9
"""Of a GPU's memory, what weights and KV may take; the rest is activations, the runtime and fragmentation."""
DEGREES = (1, 2, 4, 8, 16, 32)
MOST_GROUPS = 64


@dataclass(frozen=True, slots=True)
class Separated:
    """Prefill and decode on groups of their own: how many of each, and how long a prompt's KV takes between them."""

    prefill_groups: int
    decode_groups: int
    kv_transfer_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What would make both promises possible, everything else as asked; None where that alone cannot."""

    tpot_s: float | None
    ttft_s: float | None
    decodes: int | None
    tp: int | None
    separated: Separated | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict, c* of the closed form, memory a GPU needs and has, and the ways out (None where feasible)."""

    verdict: Verdict
    roofline_chunk: float
    memory_needed: float
    memory_there: float
    ways_out: WaysOut | None

    @property
    def fits(self) -> bool:
        return self.memory_needed <= self.memory_there

    @property
    def feasible(self) -> bool:
        return self.fits and self.verdict.feasible

    @property
    def binding(self) -> str:
        """What stands in the way: memory, tpot or ttft; empty where nothing does."""
        return self.verdict.binding if self.fits else "memory"


@dataclass(frozen=True, slots=True)
class Question:
    """A model on `tp` GPUs a group, a load, and two promises."""

    shape: ModelShape
    listed: Listed
    tp: int
    load: Load
    targets: Targets


def answer(question: Question) -> Answer:
    """The verdict and, where it is a no, the ways out."""
    q = question
    verdict = solver(q).solve(q.load, q.targets)
    c_star = roofline_chunk(q.shape, q.listed.hardware, q.load.decodes, q.load.context)
    found = Answer(verdict, c_star, memory_needed(q), _memory_there(q), None)
    return found if found.feasible else replace(found, ways_out=ways_out(q))


def solver(q: Question) -> Solver:
    return Solver(Roofline(q.shape, q.listed.hardware, q.tp), tile=q.listed.hardware.tile)


def memory_needed(q: Question) -> float:
    """Bytes a GPU: its part of the weights, of every decode's KV and of the prompt's."""
    tokens = q.load.decodes * q.load.context + q.load.prompt
    embedding = 0.0 if q.shape.tied else q.shape.weight_bytes * q.shape.vocab * q.shape.hidden
    return (q.shape.read_bytes + embedding + q.shape.kv_bytes_per_token * tokens) / q.tp


def _memory_there(q: Question) -> float:
    return MEMORY_SHARE * q.listed.hardware.memory_bytes


def ways_out(q: Question) -> WaysOut:
    """Each by itself, with the smallest change that does."""
    fits = memory_needed(q) <= _memory_there(q)
    return WaysOut(
        tpot_s=solver(q).relaxed_tpot(q.load, q.targets) if fits else None,
        ttft_s=solver(q).relaxed_ttft(q.load, q.targets) if fits else None,
        decodes=_most_decodes(q),
        tp=next((degree for degree in DEGREES if degree > q.tp and _works(replace(q, tp=degree))), None),
        separated=separated(q),
    )


def _works(q: Question) -> bool:
    if q.tp > q.shape.kv_heads or memory_needed(q) > _memory_there(q):
        return False
    return solver(q).feasible(q.load, q.targets)


def _most_decodes(q: Question) -> int | None:
    def works(decodes: int) -> bool:
        return _works(replace(q, load=replace(q.load, decodes=decodes)))

    return largest(works, q.load.decodes) if works(0) else None


def separated(q: Question) -> Separated | None:
    """The fewest groups of each kind, of `tp` GPUs each; None where no number of them does.

    A prompt goes whole through a prefill group that does nothing else, then its KV over each rank's own link; its
    transfer counts against TTFT. Decodes are spread evenly.
    """
    hardware, alone = q.listed.hardware, replace(q.load, decodes=0)
    transfer = q.shape.kv_bytes_per_token * q.load.prompt / q.tp / hardware.link_bytes
    prefill = next(
        (
            groups
            for groups in range(1, MOST_GROUPS + 1)
            if _whole_ttft(q, replace(alone, rate=q.load.rate / groups)) + transfer <= q.targets.ttft_s
        ),
        None,
    )
    decode = next((groups for groups in range(1, MOST_GROUPS + 1) if _decode_step(q, groups) <= q.targets.tpot_s), None)
    if prefill is None or decode is None:
        return None
    ttft = _whole_ttft(q, replace(alone, rate=q.load.rate / prefill)) + transfer
    return Separated(prefill, decode, transfer, ttft, _decode_step(q, decode))


def _whole_ttft(q: Question, load: Load) -> float:
    return solver(q).ttft(load, load.prompt)


def _decode_step(q: Question, groups: int) -> float:
    """Seconds of an iteration of one decode group; infinite where its decodes' KV does not fit beside the weights."""
    decodes = math.ceil(q.load.decodes / groups)
    share = replace(q, load=replace(q.load, decodes=decodes, prompt=1))
    if memory_needed(share) > _memory_there(share):
        return math.inf
    return solver(share).step(share.load)
