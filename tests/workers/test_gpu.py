"""The same checks on a CUDA device: `pytest -m gpu`.

Flash kernels take half precision, so that parity with float32 is not to be had: a token must be near the reference's
best one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.workers.driver import Driver, driver_on, loaded, reference_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKENDS = ["varlen", *(["flash_attn"] if importlib.util.find_spec("flash_attn") else [])]
PROMPT = [(37 * i) % 40_000 for i in range(600)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [10_000, 256, 64])
def test_tokens_are_near_the_top_of_the_reference(smollm2_dir: Path, backend: str, chunk: int) -> None:
    worker = loaded(smollm2_dir, blocks=64, device="cuda", dtype="bfloat16", attention=backend)
    driver = Driver(worker)
    driver.admit(0, PROMPT)
    tokens = driver.generate(0, 16, chunk)
    logits = reference_logits(smollm2_dir, PROMPT + tokens[:-1])[-16:]
    behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert behind.max() < 0.5, "no token is far from the best of the float32 reference"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_tokens_alone_and_in_a_batch(smollm2_dir: Path, backend: str) -> None:
    worker = loaded(smollm2_dir, blocks=200, device="cuda", dtype="bfloat16", attention=backend)
    alone = driver_on(worker, 200)
    alone.admit(0, PROMPT)
    expected = alone.generate(0, 16, 128)
    together = driver_on(worker, 200)
    for slot in range(1, 8):
        together.admit(slot, PROMPT[slot * 10 :][:50])
        together.step({slot: 50})
    together.admit(0, PROMPT)
    agreeing = sum(a == b for a, b in zip(expected, together.generate(0, 16, 128, range(1, 8)), strict=True))
    assert agreeing >= 15
