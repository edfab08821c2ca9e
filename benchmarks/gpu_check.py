"""The worker on a GPU without Ray: for each attention backend, closeness to transformers and the time of an iteration.

    python benchmarks/gpu_check.py [--model smollm2] [--json]

Exits 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.sampling import SamplingParams
from workers.checkpoint import resolve
from workers.config import WorkerConfig
from workers.worker import Worker

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((37 * i) % 40_000 for i in range(2048))


def backends() -> list[str]:
    return ["varlen", *(["flash_attn"] if importlib.util.find_spec("flash_attn") else [])]


def measure(folder: Path, backend: str) -> dict[str, float | str]:
    """Milliseconds (median of 20) of a decode of 32 streams at context 1,024, of a chunk of 512 and of both fused."""
    worker = Worker(WorkerConfig(str(folder), device="cuda", dtype="bfloat16", attention=backend))
    worker.load()
    blocks_of_one = -(-1100 // worker.block_size)
    worker.allocate(34 * blocks_of_one)
    admissions = tuple(Admission(slot, PROMPT[:1024], 1024, GREEDY) for slot in range(32))
    tables = [tuple(range(slot * blocks_of_one, (slot + 1) * blocks_of_one)) for slot in range(33)]
    first = tuple(Segment(slot, 0, 1024, tables[slot], True) for slot in range(32))
    result = worker.execute(IterationPlan(0, (Forward(chunks=first),), admissions))
    found: dict[str, float | str] = {"backend": backend, "behind_reference": behind(folder, result.tokens[0])}
    position = 1024

    def run(chunk: int, decodes: bool) -> float:
        nonlocal position
        entering = (Admission(40, PROMPT[:1024], 1024, GREEDY),) if chunk else ()
        chunks = (Segment(40, 0, chunk, tables[32], False),) if chunk else ()
        forward = Forward(tuple(range(32)) if decodes else (), chunks)
        torch.cuda.synchronize()
        started = time.perf_counter()
        worker.execute(IterationPlan(0, (forward,), entering))
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
        if chunk:
            worker.execute(IterationPlan(0, (), releases=(40,)))
        position += decodes
        return taken * 1e3

    for name, chunk, decodes in (("decode_32", 0, True), ("chunk_512", 512, False), ("fused", 512, True)):
        run(chunk, decodes)
        found[f"{name}_ms"] = round(statistics.median(run(chunk, decodes) for _ in range(20)), 3)
    worker.close()
    return found


def behind(folder: Path, token: int) -> float:
    """By how much a token's logit is behind the best one of transformers in float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT[:1024]])).logits[0, -1]
    return round(float(logits.max() - logits[token]), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device that torch can use", file=sys.stderr)
        sys.exit(2)
    rows = [measure(resolve(arguments.model), backend) for backend in backends()]
    if arguments.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "backends": rows}, indent=2))
        return
    print(torch.cuda.get_device_name())
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
