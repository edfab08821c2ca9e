"""Products with weights in panels, beside torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.linear import Linear, can_pack
from workers.packed import ROWS_OF_TASK, Packed, rows_of_task
from workers.vectors import PANEL, ROWS


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 3 * ROWS) | st.sampled_from([ROWS_OF_TASK, ROWS_OF_TASK + 1, 2 * ROWS_OF_TASK + ROWS + 3]),
    inner=st.integers(1, 80),
    out=st.integers(1, 3 * PANEL) | st.just(4 * PANEL),
    biased=st.booleans(),
)
def test_a_packed_product_equals_the_plain_one(rows: int, inner: int, out: int, biased: bool) -> None:
    weight, x = random(out, inner), random(rows, inner)
    bias = random(out) if biased else None
    packed, plain = Linear(weight, bias, packed=True), Linear(weight, bias, packed=False)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), first=st.integers(0, 39), count=st.integers(1, 40))
def test_a_row_has_the_same_product_to_the_bit_whatever_is_beside_it(rows: int, first: int, count: int) -> None:
    packed, x = Packed(random(PANEL + 5, 33)), random(rows, 33)
    some = slice(first, first + count)
    assert torch.equal(packed.multiply(x)[some], packed.multiply(x[some]))


@given(st.integers(1, 10_000))
def test_tasks_are_of_one_size(rows: int) -> None:
    each = rows_of_task(rows)
    tasks = -(-rows // each)
    assert each % ROWS == 0
    assert each <= ROWS_OF_TASK
    assert tasks * each - rows < ROWS * tasks, "none is smaller than the others by more than blocks that are not full"


@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_looked_up(packed: bool) -> None:
    weight = random(2 * PANEL + 7, 12)
    which = torch.tensor([0, PANEL - 1, PANEL, 2 * PANEL + 6, 3, 3])
    assert torch.equal(Linear(weight, packed=packed).rows(which), weight[which])
    assert torch.equal(Linear(weight, packed=packed).rows(torch.arange(len(weight))), weight)


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(strange: float) -> None:
    weight, x = random(PANEL, 16), random(ROWS + 1, 16)
    x[1, 3] = strange
    finite = Packed(weight).multiply(x).isfinite().all(dim=1)
    assert finite.tolist() == [row != 1 for row in range(ROWS + 1)]


def test_only_float32_on_a_cpu_is_packed() -> None:
    assert can_pack(random(2, 2))
    assert not can_pack(random(2, 2).to(torch.bfloat16))
    assert not can_pack(torch.empty(2, 2, device="meta"))
