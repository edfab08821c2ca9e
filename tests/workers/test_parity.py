"""The worker against Hugging Face transformers, on the real weights and on tiny models of every kind it supports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import save_tiny
from tests.workers.driver import Driver, driver_on, loaded, reference_logits, reference_tokens
from workers import worker as worker_module
from workers.worker import Worker

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 129, 200, 255, 300, 513, 700, 1024, 1500)
WHOLE = 10_000


def prompt_of(length: int, vocab: int = 40_000) -> list[int]:
    return [random.Random(length).randrange(100, vocab) for _ in range(length)]


@pytest.fixture(scope="module")
def real(smollm2_dir: Path) -> Iterator[Worker]:
    worker = loaded(smollm2_dir)
    yield worker
    worker.close()


@pytest.fixture
def last_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], torch.Tensor]:
    """The logits that were sampled from last."""
    kept: list[torch.Tensor] = []
    sample = worker_module.sample

    def spy(logits: torch.Tensor, rows: list[object]) -> object:
        kept.append(logits)
        return sample(logits, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "sample", spy)
    return lambda: kept[-1]


@pytest.mark.parametrize("chunk", [WHOLE, 64, 7])
def test_logits_of_the_real_model(
    real: Worker, smollm2_dir: Path, chunk: int, last_logits: Callable[[], torch.Tensor]
) -> None:
    for length in (1, 40, 300):
        driver = driver_on(real)
        driver.admit(0, prompt_of(length))
        driver.generate(0, 1, chunk)
        reference = reference_logits(smollm2_dir, prompt_of(length))[-1]
        assert (last_logits()[0] - reference).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, WHOLE), (17, WHOLE), (17, 7), (17, 1), (200, 64), (200, 7), (700, WHOLE), (700, 512)]
)
def test_greedy_tokens_of_the_real_model(real: Worker, smollm2_dir: Path, length: int, chunk: int) -> None:
    driver = driver_on(real)
    driver.admit(0, prompt_of(length))
    assert driver.generate(0, 12, chunk) == reference_tokens(smollm2_dir, prompt_of(length), 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [WHOLE, 512, 64, 7, 1])
def test_64_greedy_tokens_of_20_prompts_together(real: Worker, smollm2_dir: Path, chunk: int) -> None:
    """All twenty in one batch, each somewhere else in its prompt or its answer."""
    driver = driver_on(real, blocks=20 * (1600 // 16 + 1))
    for slot, length in enumerate(LENGTHS):
        driver.admit(slot, prompt_of(length))
    wanted = {slot: length + 64 for slot, length in enumerate(LENGTHS)}
    while open_slots := [slot for slot, total in wanted.items() if len(driver.tokens[slot]) < total]:
        driver.step({slot: min(chunk, driver.remaining(slot)) for slot in open_slots})
    for slot, length in enumerate(LENGTHS):
        assert driver.tokens[slot][length:] == reference_tokens(smollm2_dir, prompt_of(length), 64), (
            f"prompt of {length}"
        )


def test_the_same_tokens_whatever_else_is_in_the_batch(real: Worker, smollm2_dir: Path) -> None:
    driver = driver_on(real)
    for slot, length in enumerate((5, 33, 120), start=1):
        driver.admit(slot, prompt_of(length))
        driver.step({slot: length})
    driver.admit(0, prompt_of(200))
    assert driver.generate(0, 12, 64, along=(1, 2, 3)) == reference_tokens(smollm2_dir, prompt_of(200), 12)
    for slot, length in enumerate((5, 33, 120), start=1):
        generated = driver.tokens[slot][length:]
        assert generated == reference_tokens(smollm2_dir, prompt_of(length), len(generated))


def test_a_sequence_that_comes_back_goes_on_as_if_it_had_never_left(real: Worker, smollm2_dir: Path) -> None:
    """Preempted: its slot and blocks are gone, and its prompt and tokens so far are computed again, in chunks."""
    driver = driver_on(real)
    driver.admit(0, prompt_of(100))
    first = driver.generate(0, 5, WHOLE)
    driver.release(0)
    driver.admit(0, prompt_of(100) + first, prompt=100)
    assert first + driver.generate(0, 7, 32) == reference_tokens(smollm2_dir, prompt_of(100), 12)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "multi_head": {"num_key_value_heads": 9},
    "multi_query": {"num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_biases": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, tmp_path: Path, last_logits: Callable[[], torch.Tensor]) -> None:
    folder = save_tiny(tmp_path, **KINDS[kind])
    worker = loaded(folder, blocks=40, threads=1)
    driver = Driver(worker)
    driver.admit(0, prompt_of(150, 512))
    tokens = driver.generate(0, 1, 40)
    reference = reference_logits(folder, prompt_of(150, 512))[-1]
    assert (last_logits()[0] - reference).abs().max() < 1e-3
    assert tokens == [int(reference.argmax())]
    assert reference.std() > 0.1, "a model of constants would prove nothing"
