"""The same checks on a CUDA device: `pytest -m gpu`.

Flash kernels take half precision, so that parity with float32 is not to be had: a token must be near the reference's
best one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from scheduler.plan import Swap
from tests.workers.driver import Driver, driver_on, loaded, reference_logits
from workers.host_cache import HostCache
from workers.kv_cache import KvCache
from workers.kv_dtype import FP8_CAPABILITY

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


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_narrow_kv_is_near_and_the_same_in_chunks(smollm2_dir: Path, kv_dtype: str) -> None:
    if kv_dtype == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU has no fp8")
    worker = loaded(smollm2_dir, blocks=64, device="cuda", dtype="bfloat16", attention="varlen", kv_dtype=kv_dtype)
    generated = []
    for chunk in (10_000, 64):
        driver = driver_on(worker, 64)
        driver.admit(0, PROMPT)
        generated.append(driver.generate(0, 8, chunk))
    logits = reference_logits(smollm2_dir, PROMPT + generated[0][:-1])[-8:]
    behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(generated[0]).unsqueeze(1)).squeeze(1)
    assert behind.max() < 1.5
    assert generated[0][0] == generated[1][0]


def test_blocks_are_swapped_to_pinned_memory_and_back() -> None:
    cache = KvCache(3, 6, 256, 2, 64, torch.bfloat16, torch.device("cuda"))
    host = HostCache(cache, 4)
    assert all(plane.is_pinned() for plane in host.planes)
    for pages in cache.layers[1]:
        pages.write(torch.arange(6 * 256, device="cuda"), torch.randn(6 * 256, 2, 64, device="cuda"))
    before = [plane.clone() for plane in cache.planes]
    host.carry_out(Swap(True, (0, 3, 5), (2, 1, 0)))
    for plane in cache.planes:
        plane.zero_()  # on the same stream: after the copies
    host.carry_out(Swap(False, (4, 1, 2), (1, 2, 0)))
    for plane, was in zip(cache.planes, before, strict=True):
        assert torch.equal(plane[:, :, [4, 1, 2]], was[:, :, [3, 0, 5]])


def test_a_worst_iteration_is_measured(smollm2_dir: Path) -> None:
    worker = loaded(smollm2_dir, blocks=64, device="cuda", dtype="bfloat16", max_batched_tokens=4096)
    description = worker.load()
    logits = 4 * description.vocab_size * worker.config.max_running
    assert logits < description.iteration_bytes < description.free_bytes / 4
