"""Each kernel against the same in plain torch, for few rows (one thread) and for many (all of them)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from workers.elementwise import ALONE, add_and_norm, gated, turn_and_keep
from workers.kv_cache import Pages
from workers.rope import rotate

ROWS = [1, 8, ALONE // 64]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_more", [True, False])
def test_residual_and_norm(rows: int, with_more: bool) -> None:
    x, more, weight = numbers(rows, 72), numbers(rows, 72, seed=1), numbers(72, seed=2)
    total = x + more if with_more else x.clone()
    normed = add_and_norm(x, more if with_more else None, weight, 1e-5)
    assert torch.equal(x, total)
    torch.testing.assert_close(normed, F.rms_norm(total, (72,), weight, 1e-5))


@pytest.mark.parametrize("rows", ROWS)
def test_gate(rows: int) -> None:
    x = numbers(rows, 146) * 40
    torch.testing.assert_close(gated(x), F.silu(x[:, :73]) * x[:, 73:])
    assert gated(torch.full((1, 2), torch.nan)).isnan().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_norms", [True, False])
def test_rotation_and_pages(rows: int, with_norms: bool) -> None:
    heads, kv_heads, d, block = 4, 2, 16, 4
    qkv = numbers(rows, heads + 2 * kv_heads, d)
    angle = numbers(rows, 1, d // 2, seed=1)
    angles = angle.cos(), angle.sin()
    norms = numbers(heads + kv_heads, d, seed=2) if with_norms else None
    places = torch.randperm(-(-rows // block) * block, generator=torch.Generator().manual_seed(3))[:rows]
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :].clone()
    turned = rotate(qk if norms is None else F.rms_norm(qk, (d,), None, 1e-6) * norms, *angles)
    pages = tuple(Pages(torch.zeros(-(-rows // block), block, kv_heads, d)) for _ in range(2))
    q = turn_and_keep(qkv, angles, norms, 1e-6, pages, places)  # type: ignore[arg-type]
    torch.testing.assert_close(q, turned[:, :heads])
    torch.testing.assert_close(pages[0].values.flatten(0, 1)[places], turned[:, heads:])
    assert torch.equal(pages[1].values.flatten(0, 1)[places], v)
    assert pages[1].values.flatten(0, 1).count_nonzero() == v.count_nonzero(), "nothing else is written"
