"""Promises that follow from measured workers."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.tuning import promise_book
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.slo import LONGEST_PROMISE_S

SLOW = OnlineCostModel(Coefficients(0.0237, 0.03, 0.00198, 6e-6, 3e-7, 1e-4, 1.0, 2e-5, 0.01))


def test_a_prompt_that_takes_more_than_a_day_is_promised_the_longest_there_is() -> None:
    book = promise_book(EngineConfig(), SLOW)
    assert book.promise(100_000).ttft_s == LONGEST_PROMISE_S
    assert book.promise(100).ttft_s < book.promise(1000).ttft_s < LONGEST_PROMISE_S
