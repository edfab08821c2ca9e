"""All layers over arrays, against each by itself over tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import save_tiny
from workers.attention import Layout, make_layout, token_positions
from workers.attention.cpu import CpuAttention
from workers.kv_cache import KvCache
from workers.model import LlamaModel
from workers.model_config import read_config
from workers.parallel import Ranks

CPU, BLOCK = torch.device("cpu"), 4
STARTS, COUNTS = np.array([0, 9, 5, 0], np.int32), np.array([7, 1, 3, 1], np.int32)


def layout() -> Layout:
    tables = np.arange(4 * 4, dtype=np.int32).reshape(4, 4)[::-1]
    return make_layout(STARTS, COUNTS, tables, BLOCK, CPU)


def pages(model: LlamaModel, dtype: torch.dtype) -> KvCache:
    """With something in them already."""
    kv = KvCache(len(model.layers), 16, BLOCK, model.shard.kv_heads.size, model.shard.head_dim, dtype, CPU)
    rows = torch.randn(16 * BLOCK, *kv.layers[0][0].values.shape[2:], generator=torch.Generator().manual_seed(1))
    for of_layer in kv.layers:
        for kept in of_layer:
            kept.write(torch.arange(len(rows)), rows)
    return kv


STEPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 4e-2}
"""What two numbers that are all but the same may be apart once kept, of the largest of them."""


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", STEPS, ids=str)
def test_the_same_comes_of_both(tmp_path: Path, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, kind)
    model = LlamaModel(folder, read_config(folder), Ranks(), CPU, torch.float32, 64)
    positions = torch.from_numpy(token_positions(STARTS, COUNTS))
    tokens = torch.arange(len(positions)) + 3
    together, by_layer = pages(model, dtype), pages(model, dtype)
    found = model.hidden(tokens, positions, together, CpuAttention(dtype), layout())
    assert model._on_cpu is not None
    monkeypatch.setattr(model, "_on_cpu", None)
    expected = model.hidden(tokens, positions, by_layer, CpuAttention(dtype), layout())
    close(found, expected, dtype)
    for ours, theirs in zip(together.layers, by_layer.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            close(*(kept.read(torch.arange(16), torch.float32) for kept in (a, b)), dtype)
    if dtype == torch.float32:
        assert found.equal(expected), "by the same kernels, in the same order"


@pytest.mark.parametrize("together", [True, False], ids=["arrays", "layers"])
@pytest.mark.parametrize("asked", [(), (0,), (1, 4), None], ids=str)
def test_of_the_last_layer_only_what_is_asked_for(
    tmp_path: Path, asked: tuple[int, ...] | None, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are the same numbers as among all, and keys and values are there of all."""
    folder = save_tiny(tmp_path, "qwen3")
    model = LlamaModel(folder, read_config(folder), Ranks(), CPU, torch.float32, 64)
    if not together:
        monkeypatch.setattr(model, "_on_cpu", None)
    positions = torch.from_numpy(token_positions(STARTS, COUNTS))
    tokens = torch.arange(len(positions)) + 3
    rows = torch.arange(len(tokens)) if asked is None else torch.tensor(asked, dtype=torch.int64)
    of_some, of_all = pages(model, torch.float32), pages(model, torch.float32)
    found = model.hidden(tokens, positions, of_some, CpuAttention(), layout(), rows)
    expected = model.hidden(tokens, positions, of_all, CpuAttention(), layout())
    assert found.equal(expected[rows])
    for ours, theirs in zip(of_some.layers, of_all.layers, strict=True):
        assert all(a.values.equal(b.values) for a, b in zip(ours, theirs, strict=True))


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() <= STEPS[dtype] * expected.abs().max()
