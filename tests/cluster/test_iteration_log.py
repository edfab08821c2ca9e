"""The decision log, the figures and the promises' attainment of a loop that really runs (with a worker of bookkeeping
only)."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from cluster.attainment import WINDOW_S, Attainment
from cluster.config import EngineConfig
from cluster.instruments import Instruments
from cluster.loop import IterationLoop
from cluster.tuning import Tuning
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.policies import make_policy
from scheduler.progress import Served
from scheduler.request import Finish, Request
from scheduler.scheduler import Scheduler
from scheduler.slo import Outcome, Promise, PromiseBook
from tests.cluster.test_loop import CONFIG, StrictExecutor

COST = Coefficients(0.01, 0.2, 0.01, 0.0, 0.0, 0.0, 2.0)


class Rig:
    """A loop under the slo policy with its instruments. Each look at its clock takes half a second."""

    def __init__(self, log: Path | None = None, kept: int = 100) -> None:
        ticks = itertools.count()
        self.tuning = Tuning(OnlineCostModel(COST), PromiseBook(lambda tokens: Promise(60, 5)))
        config = EngineConfig(iterations_kept=kept, iteration_log=None if log is None else str(log))
        self.instruments = Instruments(config, "m", self.tuning)
        scheduler = Scheduler(CONFIG, make_policy("slo", cost=self.tuning.cost))
        scheduler.intake.promises = self.tuning.promises
        self.done = asyncio.Event()
        self.loop = IterationLoop(
            scheduler,
            StrictExecutor(CONFIG),
            clock=lambda: next(ticks) / 2,
            publish=lambda deltas: self.done.set() if any(d.finish for d in deltas) else None,
            observer=self.instruments.of(0),
            predict=self.tuning.predict,
        )
        self.task = asyncio.create_task(self.loop.run())

    async def serve(self, request: Request) -> None:
        self.done.clear()
        self.loop.add(request)
        await self.done.wait()
        await asyncio.sleep(0)

    @property
    def figures(self) -> str:
        return self.instruments.expose([self.loop.scheduler.stats()]).decode()


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.loop.close()
    await made.task


def value(figures: str, name: str, **labels: str) -> float:
    for line in figures.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{text}"' in line for key, text in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} is not among the figures")


async def test_an_iteration_is_logged_with_its_budget_its_reason_and_its_times(rig: Rig) -> None:
    await rig.serve(Request("r", tuple(range(20)), 3, promise=Promise(30, 4, 9)))
    entries = rig.instruments.log.entries(-1, 100)
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    first, *others = entries
    assert first["chunks"] == [
        {
            "request": "r", "offset": 0, "count": 20, "prompt_tokens": 20, "waited_ms": first["chunks"][0]["waited_ms"],
            "ttft_ms": 30e3, "tpot_ms": 4e3, "tbt_ms": 9e3,
        }
    ]  # fmt: skip
    assert first["budget"] == first["prefill_tokens"] == 20
    assert first["bound"] == "prompts"
    assert first["decodes"] == 0
    assert first["predicted_ms"] == pytest.approx(1e3 * (0.01 + math.hypot(0.2, 0.2)))
    assert first["actual_ms"] > 0
    assert [entry["tokens"] for entry in entries] == [["r"]] * 3
    assert [entry["finished"] for entry in entries] == [[], [], ["r"]]
    assert all(entry["bound"] == "none" and entry["decodes"] == 1 for entry in others)


async def test_the_log_is_read_in_pages_and_forgets_the_oldest() -> None:
    rig = Rig(kept=5)
    await rig.serve(Request("r", (1, 2, 3), 12))
    log = rig.instruments.log
    assert [entry["seq"] for entry in log.entries(-1, 3)] == [10, 11, 12]
    assert [entry["seq"] for entry in log.entries(0, 100)] == [8, 9, 10, 11, 12], "the oldest are gone"
    assert [entry["seq"] for entry in log.entries(9, 2)] == [10, 11]
    assert log.entries(12, 10) == log.entries(99, 10) == []
    rig.loop.close()
    await rig.task


async def test_health_checks_leave_no_trace(rig: Rig) -> None:
    await rig.loop.heartbeat()
    assert rig.instruments.log.entries(-1, 10) == []
    assert value(rig.figures, "stallfree_time_to_first_token_seconds_count") == 0


async def test_the_log_goes_to_a_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rig = Rig(path)
    await rig.serve(Request("r", (1, 2, 3), 4))
    rig.instruments.log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == rig.instruments.log.entries(0, 100)
    rig.loop.close()
    await rig.task


def test_a_log_that_cannot_be_written_is_an_error_of_one_line() -> None:
    with pytest.raises(ValueError, match="the iteration log cannot be written"):
        Instruments(EngineConfig(iteration_log="/proc/nowhere/log"), "m", None)


async def test_figures_by_class_and_by_what_bound_the_budget(rig: Rig) -> None:
    await rig.serve(Request("kept", tuple(range(20)), 3))
    await rig.serve(Request("late", tuple(range(30, 50)), 3, promise=Promise(0.1, 5)))
    await rig.serve(Request("slow", tuple(range(60, 80)), 3, promise=Promise(60, 0.01)))
    figures = rig.figures
    assert value(figures, "stallfree_slo_requests_total", slo_class="default", result="met") == 1
    assert value(figures, "stallfree_slo_requests_total", slo_class="custom", result="ttft_missed") == 1
    assert value(figures, "stallfree_slo_requests_total", slo_class="custom", result="tpot_missed") == 1
    assert value(figures, "stallfree_slo_attainment", slo_class="default") == 1
    assert value(figures, "stallfree_slo_attainment", slo_class="custom") == 0
    assert value(figures, "stallfree_goodput_requests_per_second", slo_class="default") > 0
    assert value(figures, "stallfree_iterations_total", bound="prompts") == 3
    assert value(figures, "stallfree_iteration_token_budget_sum") == 60
    assert value(figures, "stallfree_request_queue_seconds_count") == 3
    assert value(figures, "stallfree_time_per_output_token_seconds_count") == 3
    assert value(figures, "stallfree_prediction_error_ratio_count") == 9
    assert value(figures, "stallfree_prediction_correction") > 1, "the clock is slower than the model"
    assert value(figures, "stallfree_kv_usage_ratio") == 0


async def test_what_ends_outside_of_an_iteration_is_counted_too(rig: Rig) -> None:
    """A reader that found its stop string has had all it asked for; one that went away has not."""
    for request_id, finish in (("stopped", Finish.STOP), ("gone", Finish.ABORT)):
        rig.done.clear()
        rig.loop.add(Request(request_id, (1, 2, 3), 50))
        while not any(s.request_id == request_id and len(s.tokens) > 5 for s in rig.loop.scheduler.running):  # noqa: ASYNC110
            await asyncio.sleep(0)
        rig.loop.abort(request_id, finish)
        await rig.done.wait()
    figures = rig.figures
    assert value(figures, "stallfree_requests_finished_total", finish="stop") == 1
    assert value(figures, "stallfree_requests_finished_total", finish="abort") == 1
    assert value(figures, "stallfree_slo_requests_total", slo_class="default", result="met") == 1
    await rig.serve(Request("next", (1, 2, 3), 1))
    assert [name for entry in rig.instruments.log.entries(0, 100) for name in entry["finished"]] == [
        *("stopped", "gone", "next")
    ]


def test_attainment_forgets_after_its_window() -> None:
    now = [0.0]
    registry = CollectorRegistry()
    attainment = Attainment(registry, {}, ["gold"], clock=lambda: now[0])
    promise = Promise(1, 0.1)

    def figure(name: str) -> float:
        attainment.refresh()
        text = generate_latest(registry).decode()
        return float(
            next(line for line in text.splitlines() if line.startswith(f'{name}{{slo_class="gold"')).split()[1]
        )

    assert math.isnan(figure("stallfree_slo_attainment"))
    now[0] = 10.0
    for ttft in (0.5, 0.6, 2.0, 0.7):
        attainment.observe(Served("r", "gold", Outcome(ttft, 0.05, 0.05, promise)))
    assert figure("stallfree_slo_attainment") == 0.75
    assert figure("stallfree_goodput_requests_per_second") == pytest.approx(3 / 10)
    now[0] = 40.0
    attainment.observe(Served("r", "gold", Outcome(0.5, 0.05, 0.05, promise)))
    now[0] = 11.0 + WINDOW_S
    assert figure("stallfree_slo_attainment") == 1.0
    assert figure("stallfree_goodput_requests_per_second") == pytest.approx(1 / WINDOW_S)
