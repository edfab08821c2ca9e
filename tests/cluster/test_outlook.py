"""What is said of a server's promises, from its measured cost: colocated and separated."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.outlook import Outlook, describe, outlook
from cluster.tuning import promise_book
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.solver import Solver

COST = Coefficients(0.002, 0.02, 1e-4, 1e-6, 1e-9, 1e-4, 3.0)


def told(separated: bool, **options: float) -> Outlook:
    cost = OnlineCostModel(COST)
    book = promise_book(EngineConfig(**options), cost, cost if separated else None)  # type: ignore[arg-type]
    solver = Solver(COST, cap=2048)
    return outlook(solver, book, max_model_len=8192, max_running=64, streams_solver=solver if separated else None)


def test_default_promises_can_be_kept_both_ways() -> None:
    for separated in (False, True):
        found = told(separated)
        assert found.separated is separated
        assert found.ways_out is None
        assert all(row.feasible for row in found.ttft)
        assert "verdict" not in describe(found)


def test_a_ttft_that_is_missed_says_among_whom() -> None:
    colocated, separated = (describe(told(apart, ttft_ms=60, tpot_ms=40))["verdict"] for apart in (False, True))
    assert "among 8 streams (ttft binds); what would do for 512: a TPOT of" in colocated
    assert "of a prompt that is alone on a prefill group (ttft binds); what would do for 2,048: a TTFT of" in separated
    assert "streams" not in separated


def test_a_pace_that_a_decode_group_cannot_keep_is_no_matter_of_prompts() -> None:
    found = told(True, ttft_ms=60_000, tpot_ms=23.5)
    assert found.longest_prompt == 0
    assert not any(row.feasible for row in found.ttft)
    assert found.ways_out is not None
    assert found.ways_out.binding == "tpot"
    step = found.smallest_tpot_ms[8]
    assert found.ways_out.tpot_ms == step > 23.5
    most = found.ways_out.decodes
    assert most is not None
    assert told(True, ttft_ms=60_000, tpot_ms=step + 0.1).ways_out is None
    assert describe(found)["verdict"] == (
        "the default promise is never kept by a decode group with 8 streams (tpot binds); what would do: "
        f"a TPOT of {step:.0f} ms, or at most {most} streams"
    )
