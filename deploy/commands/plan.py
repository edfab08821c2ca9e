"""`stallfree plan`: can both promises be kept by this model on that GPU, and if not, what would do it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from deploy.described import BYTES, bytes_of, gpu_of, shape_of
from deploy.errors import CommandError
from scheduler.capacity import Answer, Question, answer
from scheduler.solver import Load, Targets

MOST = 1 << 20
"""Of a prompt, of decodes, of a context: what is beyond any machine only makes the search long."""


def plan(
    *,
    model: Annotated[str, typer.Option(help="A known model's name, or a directory with its config.json.")],
    gpu_name: Annotated[str | None, typer.Option("--gpu", help="A known GPU, such as A100-80 or H100.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel GPUs of a group.", min=1)] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1, max=MOST)] = 2048,
    decodes: Annotated[int, typer.Option(help="Streams that decode meanwhile.", min=0, max=MOST)] = 32,
    context: Annotated[int, typer.Option(help="Their mean context in tokens.", min=0, max=MOST)] = 1024,
    ttft_ms: Annotated[float, typer.Option(help="Promised time to first token.")] = 2000,
    tpot_ms: Annotated[float, typer.Option(help="Promised time per output token.")] = 100,
    rate: Annotated[float, typer.Option(help="Prompts a second that arrive at a group (0: no queue).", min=0)] = 0,
    weights: Annotated[str, typer.Option(help="Weight format: " + ", ".join(BYTES))] = "bf16",
    kv: Annotated[str, typer.Option(help="KV format.")] = "bf16",
    peak_tflops: Annotated[float | None, typer.Option(help="Of a GPU not in the table.")] = None,
    bandwidth_tbps: Annotated[float | None, typer.Option(help="Memory bandwidth in TB/s, likewise.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory, likewise. [default: 80]", min=0.001)] = None,
    link_gbps: Annotated[float, typer.Option(help="GB/s between GPUs, likewise.", min=0.001)] = 25,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Say whether one chunk size keeps both promises, and if none does, the nearest ways out."""
    try:
        question = Question(
            shape=shape_of(model, bytes_of(weights), bytes_of(kv)),
            listed=gpu_of(gpu_name, peak_tflops, bandwidth_tbps, memory_gb, link_gbps),
            tp=tp,
            load=Load(prompt, decodes, context, rate),
            targets=Targets(ttft_ms / 1e3, tpot_ms / 1e3),
        )
        if tp > question.shape.kv_heads:
            raise ValueError(f"--tp {tp} is too large: {question.shape.name} has {question.shape.kv_heads} KV heads")
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    found = answer(question)
    print(json.dumps(as_dict(question, found), indent=2) if as_json else as_text(question, found))


def as_dict(question: Question, found: Answer) -> dict[str, Any]:
    """Times in milliseconds; what has no end is null."""
    verdict, ways = found.verdict, found.ways_out
    return {
        "model": question.shape.name,
        "parameters": question.shape.parameters,
        "gpu": question.listed.hardware.name,
        "gpu_source": question.listed.source,
        "tp": question.tp,
        "feasible": found.feasible,
        "binding": found.binding or None,
        "chunk_tokens": verdict.chunk,
        "chunk_range": list(verdict.chunk_range) if verdict.chunk_range and found.fits else None,
        "roofline_chunk_tokens": round(found.roofline_chunk, 1),
        "iteration_ms": _ms(verdict.iteration_s),
        "ttft_ms": _ms(verdict.ttft_s),
        "tpot_ms": _ms(verdict.tpot_s),
        "memory_needed_gb": round(found.memory_needed / 1e9, 2),
        "memory_available_gb": round(found.memory_there / 1e9, 2),
        "ways_out": None
        if ways is None
        else {
            "tpot_ms": _ms(ways.tpot_s),
            "ttft_ms": _ms(ways.ttft_s),
            "decodes": ways.decodes,
            "tp": ways.tp,
            "separated": None
            if ways.separated is None
            else {
                "prefill_groups": ways.separated.prefill_groups,
                "decode_groups": ways.separated.decode_groups,
                "kv_transfer_ms": _ms(ways.separated.kv_transfer_s),
                "ttft_ms": _ms(ways.separated.ttft_s),
                "tpot_ms": _ms(ways.separated.tpot_s),
            },
        },
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else math.ceil(seconds * 1e6) / 1e3


def as_text(question: Question, found: Answer) -> str:
    facts = as_dict(question, found)
    load, name = question.load, f"{facts['model']} on {question.tp} x {facts['gpu']}"
    asked = f"prompts of {load.prompt:,} tokens among {load.decodes} streams of {load.context:,}"
    promised = f"TTFT {question.targets.ttft_s * 1e3:g} ms and TPOT {question.targets.tpot_s * 1e3:g} ms"
    lines = [f"{name}, {asked}, promised {promised}:"]
    if found.feasible:
        low, high = facts["chunk_range"]
        lines.append(f"  feasible: chunks of {low:,} to {high:,} tokens keep both promises.")
    elif not found.fits:
        lines.append(
            f"  infeasible: {facts['memory_needed_gb']} GB of {facts['memory_available_gb']} GB a GPU are needed."
        )
    else:
        lines.append(f"  infeasible: {found.binding.upper()} stands in the way; no chunk size keeps both promises.")
    reached = "never (prompts arrive faster)" if facts["ttft_ms"] is None else f"{facts['ttft_ms']:,} ms"
    lines.append(f"  at {facts['chunk_tokens']:,} tokens: iteration {facts['iteration_ms']} ms, TTFT {reached}")
    lines.append(f"  the roofline's ridge is at a chunk of {facts['roofline_chunk_tokens']:,} tokens")
    if facts["ways_out"] is not None:
        lines.append("  ways out, each by itself:")
        lines += [f"    {line}" for line in _ways(facts["ways_out"])] or ["    none of those known"]
    return "\n".join(lines)


def _ways(ways: dict[str, Any]) -> list[str]:
    lines = []
    if ways["tpot_ms"] is not None:
        lines.append(f"promise a TPOT of {ways['tpot_ms']:,} ms")
    if ways["ttft_ms"] is not None:
        lines.append(f"promise a TTFT of {ways['ttft_ms']:,} ms")
    if ways["decodes"] is not None:
        lines.append(f"run at most {ways['decodes']} streams")
    if ways["tp"] is not None:
        lines.append(f"take {ways['tp']} GPUs a group (tensor parallel)")
    if ways["separated"] is not None:
        s = ways["separated"]
        lines.append(
            f"separate {s['prefill_groups']} prefill and {s['decode_groups']} decode groups: TTFT {s['ttft_ms']:,} ms "
            f"(of which KV transfer {s['kv_transfer_ms']:,} ms), TPOT {s['tpot_ms']:,} ms"
        )
    return lines
