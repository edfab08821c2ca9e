"""Runs requests on a worker by hand-made plans, and what transformers gives for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from scheduler.plan import Admission, Forward, IterationPlan, IterationResult, Segment
from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams
from workers.config import WorkerConfig
from workers.worker import Worker

GREEDY = SamplingParams(temperature=0.0)


def loaded(folder: Path, blocks: int = 700, **options: object) -> Worker:
    worker = Worker(WorkerConfig(str(folder), **options))  # type: ignore[arg-type]
    worker.load()
    worker.allocate(blocks)
    return worker


def driver_on(worker: Worker, blocks: int = 700) -> Driver:
    """A worker with nothing on it, and its driver."""
    worker.allocate(blocks)
    return Driver(worker)


@dataclass
class Driver:
    """Gives each sequence a slot and blocks of its own, and steps any mix of chunks and decodes."""

    worker: Worker
    iteration: int = 0
    next_block: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    fresh: list[Admission] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    """Slots whose prompts' log-probabilities are wanted: those are in `scores`."""
    scores: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def admit(self, slot: int, tokens: Sequence[int], sampling: SamplingParams = GREEDY, prompt: int = 0) -> None:
        self.tokens[slot], self.computed[slot], self.blocks[slot] = list(tokens), 0, []
        self.fresh.append(Admission(slot, tuple(tokens), prompt or len(tokens), sampling))

    def release(self, slot: int) -> None:
        self.gone.append(slot)
        del self.tokens[slot]

    def step(self, counts: dict[int, int]) -> IterationResult:
        """One fused forward with `counts` tokens of each slot: decodes where that is the last one, chunks otherwise."""
        chunks: list[Segment] = []
        decodes: list[int] = []
        new_blocks: list[tuple[int, int]] = []
        for slot, count in counts.items():
            start = self.computed[slot]
            need = -(-(start + count) // self.worker.block_size) - len(self.blocks[slot])
            new = list(range(self.next_block, self.next_block + max(0, need)))
            self.next_block += len(new)
            self.blocks[slot] += new
            self.computed[slot] = start + count
            sample = start + count == len(self.tokens[slot])
            if sample and count == 1 and slot not in self.scored:
                decodes.append(slot)
                new_blocks += [(slot, block) for block in new]
            else:
                chunks.append(Segment(slot, start, count, tuple(new), sample, slot in self.scored))
        forward = Forward(tuple(decodes), tuple(chunks), tuple(new_blocks))
        plan = IterationPlan(self.iteration, (forward,), tuple(self.fresh), tuple(self.gone))
        self.iteration += 1
        self.fresh, self.gone = [], []
        result = self.worker.execute(plan)
        sampled = [*decodes, *(chunk.slot for chunk in chunks if chunk.sample)]
        for slot, token in zip(sampled, result.tokens, strict=True):
            self.tokens[slot].append(token)
        told = [chunk.slot for chunk in chunks if chunk.score]
        for slot, part in zip(told, result.prompt_logprobs, strict=True):
            self.scores.setdefault(slot, []).extend(part)
        return result

    def remaining(self, slot: int) -> int:
        return len(self.tokens[slot]) - self.computed[slot]

    def generate(self, slot: int, count: int, chunk: int, along: Sequence[int] = ()) -> list[int]:
        """`count` more tokens of a slot in chunks of `chunk`, each forward with one token of every slot in `along`."""
        had = len(self.tokens[slot])
        while len(self.tokens[slot]) < had + count:
            counts = dict.fromkeys(along, 1)
            counts[slot] = min(chunk, self.remaining(slot))
            self.step(counts)
        return self.tokens[slot][had:]


@cache
def reference_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def reference_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of Hugging Face transformers."""
    return list(_reference_tokens(folder, tuple(prompt), count))


@cache
def _reference_tokens(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    model = reference_model(folder)
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return tuple(int(token) for token in out[0, len(prompt) :])


def reference_logits(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of Hugging Face transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([list(prompt)])).logits[0]
    return logits
