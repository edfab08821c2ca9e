"""Log-probabilities of prompts against Hugging Face transformers, in chunks of any size and beside others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams
from tests.conftest import save_tiny
from tests.workers.driver import driver_on, loaded, reference_logits
from workers.worker import Worker

VOCAB = 128
SCORING = SamplingParams(temperature=0.0, prompt_logprobs=3)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Iterator[Worker]:
    worker = loaded(tiny_dir, 64)
    yield worker
    worker.close()


def prompt_of(length: int, vocab: int = VOCAB) -> list[int]:
    return [random.Random(length).randrange(vocab) for _ in range(length)]


def check(found: Sequence[TokenLogprob], folder: Path, prompt: Sequence[int]) -> None:
    """Each within 1e-4 of the reference, with its three likeliest alternatives in order."""
    reference = torch.log_softmax(reference_logits(folder, prompt), dim=1)
    assert len(found) == len(prompt) - 1
    for row, (token, score) in enumerate(zip(prompt[1:], found, strict=True)):
        assert score.logprob == pytest.approx(float(reference[row, token]), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(reference[row].topk(3).values.tolist(), abs=1e-4)
        for other, value in score.top:
            assert value == pytest.approx(float(reference[row, other]), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_a_tiny_model(tiny: Worker, tiny_dir: Path, chunk: int) -> None:
    for length in (2, 17, 90):
        driver = driver_on(tiny, 64)
        driver.scored.add(0)
        driver.admit(0, prompt_of(length), SCORING)
        while driver.remaining(0) and len(driver.tokens[0]) == length:
            driver.step({0: min(chunk, driver.remaining(0))})
        check(driver.scores[0], tiny_dir, prompt_of(length))


def test_beside_decodes_and_other_prompts(tiny: Worker, tiny_dir: Path) -> None:
    driver = driver_on(tiny, 64)
    driver.scored |= {1, 2}
    for slot, length in ((0, 20), (1, 33), (2, 40), (3, 50)):
        driver.admit(slot, prompt_of(length), SCORING if slot in driver.scored else SamplingParams(temperature=0.0))
    driver.generate(0, 1, 20)
    for counts in ({0: 1, 3: 9, 1: 10, 2: 7}, {2: 33, 0: 1, 1: 11, 3: 41}, {0: 1, 1: 12}):
        driver.step(counts)
    check(driver.scores[1], tiny_dir, prompt_of(33))
    check(driver.scores[2], tiny_dir, prompt_of(40))
    assert set(driver.scores) == {1, 2}


def test_a_resumed_sequence_scores_its_prompt_alone(tiny: Worker, tiny_dir: Path) -> None:
    """What it had produced is no prompt."""
    driver = driver_on(tiny, 64)
    driver.scored.add(0)
    driver.admit(0, prompt_of(30), SCORING, prompt=21)
    driver.step({0: 18})
    driver.step({0: 12})
    check(driver.scores[0], tiny_dir, prompt_of(30)[:21])


def test_few_rows_at_a_time(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of logits is as long as the vocabulary."""
    asked: list[int] = []
    logits = tiny.model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(tiny.model, "logits", spy)
    driver = driver_on(tiny, 64)
    driver.scored.add(0)
    driver.admit(0, prompt_of(100), SCORING)
    driver.step({0: 100})
    most = min(64, tiny.config.max_running)
    assert sum(asked) == 99 + 1
    assert max(asked) == most


def test_the_real_model(smollm2_dir: Path) -> None:
    worker = loaded(smollm2_dir)
    prompt = prompt_of(150, 40_000)
    try:
        for chunk in (150, 32):
            driver = driver_on(worker)
            driver.scored.add(0)
            driver.admit(0, prompt, SCORING)
            while len(driver.tokens[0]) == len(prompt):
                driver.step({0: min(chunk, driver.remaining(0))})
            check(driver.scores[0], smollm2_dir, prompt)
    finally:
        worker.close()
