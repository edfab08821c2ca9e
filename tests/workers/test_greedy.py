"""The likeliest token by the kernel and by torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.greedy import likeliest, likeliest_torch


@pytest.mark.parametrize("vocab", [1, 7, 1024, 5000])
@pytest.mark.parametrize("shift", [0.0, -20.0, 20.0])
def test_the_kernel_equals_the_plain_path(vocab: int, shift: float) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) + shift
    logits[3:6] = logits[3:6].round()  # with equals among the best
    logits[6, : vocab // 2] = -math.inf
    for found, expected in zip(likeliest(logits), likeliest_torch(logits), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_rows_that_are_not_finite(value: float) -> None:
    logits = torch.zeros(3, 3000)
    logits[1, 2000] = value
    logits[2] = -math.inf
    assert likeliest(logits)[1].tolist() == likeliest_torch(logits)[1].tolist() == [True, False, False]
