"""The scripts behind docs/fidelity.md and docs/scaling.md, on tiny loads: they run, and what always holds does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from benchmarks.live_fidelity import mixed, row, served_as
from benchmarks.publications.bound import COST, fits, highest, sustained
from benchmarks.publications.classes import EachClass, in_time, kept_by_class
from benchmarks.publications.distserve import MOST_TOGETHER, OPT_13B, OPT_13B_COST, PromptsFirst
from benchmarks.publications.forwards import tile
from benchmarks.publications.held import machine_of, served
from benchmarks.publications.mooncake import in_time_alone, spread
from benchmarks.publications.options import Options
from benchmarks.publications.sarathi import ablation
from benchmarks.published import ITEMS
from benchmarks.scaling import actor, costs, one
from cluster.config import EngineConfig
from cluster.simulated.seen import SeenIterations, SeenRequest, Simulation
from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt, TraceRow
from scheduler.costmodel import Coefficients, Sample
from scheduler.roofline import Features
from scheduler.slo import Promise

TINY = Options(seeds=1, duration=5.0, rows=60)


def test_a_token_more_than_a_tile_costs_more_than_a_token() -> None:
    assert all(row["one more"] > row["ms"] for row in tile(TINY))


def test_hybrid_batches_without_chunks_have_the_best_ttft_and_the_worst_gaps() -> None:
    rows = {(row["way"], row["chunk"]): row for row in ablation(Options(seeds=1, duration=60.0, rows=60))}
    hybrid, chunks, both = rows["hybrid only", 8192], rows["chunking only", 512], rows["both", 512]
    assert hybrid["P50 TTFT s"] < both["P50 TTFT s"] < chunks["P50 TTFT s"]
    assert hybrid["P99 TBT s"] > chunks["P99 TBT s"] > both["P99 TBT s"]


def test_distserves_model_of_a_whole_prompt() -> None:
    """18.1 + 0.1019 x 512 + 7.1e-6 x 512^2 ms; in two chunks the same work, and one intercept more."""
    whole = OPT_13B_COST.predict(Features().with_chunk(0, 512))
    assert whole == pytest.approx(0.07215, rel=1e-3)
    halves = [OPT_13B_COST.predict(Features().with_chunk(start, 256)) for start in (0, 256)]
    assert sum(halves) == pytest.approx(whole + OPT_13B_COST.prefill[0] / 1e3)


def test_requests_of_one_tick_are_spread_over_it() -> None:
    rows = [TraceRow(at_s, 10, 10) for at_s in (0.0, 0.0, 0.0, 3.0, 6.0, 6.0)]
    assert [row.at_s for row in spread(rows)] == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]


def test_the_command_of_the_docs_runs_as_it_stands() -> None:
    root = Path(__file__).parents[1]
    command = next(line for line in (root / "docs" / "fidelity.md").read_text().splitlines() if "[ITEM ...]" in line)
    python, *words = command.replace("[ITEM ...]", "forward --json").split()
    assert python == "python"
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, *words], cwd=root, env=alone, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[0])["item"] == "forward"


def test_prompts_first_has_no_stream_in_it_while_one_waits() -> None:
    config = EngineConfig(model="OPT-13B", policy="whole", groups=1, block_size=16)
    loads = OpenLoop([PlannedRequest(RandomPrompt(1500, str(n)), 6, 0.02 * n) for n in range(12)])
    machine = machine_of(config, OPT_13B, OPT_13B_COST)
    first, owed = (
        served(config, machine, loads, own=own) for own in (lambda config: PromptsFirst(MOST_TOGETHER), None)
    )
    assert max(first.requests[0].gaps) > 2 * max(owed.requests[0].gaps), "it waits for all prompts there are"
    assert len(first.requests[0].tokens) == len(owed.requests[0].tokens) == 6


def test_no_more_than_what_a_gpu_has_time_for() -> None:
    """Prompts alone, of 1,000 tokens: by their time in a large batch, and more where a tenth need not be served."""
    rows = [TraceRow(0.1 * number, 1000, 1) for number in range(400)]
    alone = COST.predict(Features().with_chunk(0, 8000)) / 8
    everything, most = sustained(rows, 1.0), sustained(rows, 0.9)
    assert 0.8 / alone < everything < 1.6 / alone
    assert most == pytest.approx(everything / 0.9, rel=1e-3)
    assert highest(rows) > most, "what came before the end may be done after it"


def test_no_pause_makes_a_burst_fit() -> None:
    """What a GPU did before a burst came is of no use to it."""
    burst = [TraceRow(0.01 * number, 1000, 1) for number in range(400)]
    after = [TraceRow(100 + row.at_s, row.prompt_tokens, row.output_tokens) for row in burst]
    assert not fits(burst, 1.0)
    assert not fits([TraceRow(0.0, 10, 1), *after], 1.0)
    assert fits([TraceRow(0.0, 10, 1), *after], 0.05)


def test_each_class_is_judged_by_its_own_promise() -> None:
    def seen(kind: str, ended: float, *tokens: float) -> SeenRequest:
        planned = PlannedRequest(RandomPrompt(5, kind), len(tokens), 0.0, kind=kind)
        return SeenRequest(planned, 0.0, 5, Promise(6.0, 0.05), tokens=array("d", tokens), ended=ended)

    late, slow, slower = seen("interactive", 7.0, 6.5, 6.54), seen("soon", 599, 9, 599), seen("soon", 601, 9, 601)
    assert [in_time(of) for of in (late, slow, slower)] == [False, True, False]
    run = Simulation([late, slow, slower, seen("later", 1700, 9, 1700)], SeenIterations(), 1700, 1, 1)
    assert kept_by_class(run) == {"interactive": 0.0, "soon": 0.5, "later": 1.0}
    assert EachClass(delay_s=0.0).broken(run) == "interactive: 0.0% kept"


def test_prompts_that_no_idle_gpu_computes_in_time_are_told_apart() -> None:
    """At about 20 ms for 256 tokens and 8,192 together, 2 s are some 20,000 tokens."""
    assert in_time_alone(TraceRow(0.0, 10_000, 5), 2.0)
    assert not in_time_alone(TraceRow(0.0, 60_000, 5), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "capacity", "distserve", "niyama", "classes", "mooncake"])
def test_each_item_runs(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 500 * n, "input_length": 600, "output_length": 9, "hash_ids": [n % 7, n]} for n in range(60))
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = Options(seeds=1, duration=5.0, rows=60, mooncake_trace=trace)
    assert len(list(islice(ITEMS[name](options), 1))) == 1


def test_a_scheduler_that_is_busy_delays_iterations_unless_they_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    alone, overlapped = actor([2], cost_ms=5.0, rate=4.0, duration=3.0)
    assert alone["P50 ITL ms"] > alone["P50 ITL without ms"] + 4
    assert overlapped["P50 ITL ms"] < alone["P50 ITL ms"] - 3
    few, many = costs((4, 64))
    assert few["schedule + commit ms"] < many["schedule + commit ms"]
    assert one(60, 2, every=25)[0]["requests"] == 60
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["25", "50"]


def test_runs_of_the_mixed_load_differ_in_what_prompts_say_alone() -> None:
    first, second = (mixed(2.0, 20.0, run).requests for run in (0, 1))
    assert len(first) > 20
    assert [(of.at_s, of.prompt_tokens, of.output_tokens) for of in first] == [
        (of.at_s, of.prompt_tokens, of.output_tokens) for of in second
    ]
    assert not {str(of.prompt) for of in first} & {str(of.prompt) for of in second}
    assert max(of.prompt_tokens or 0 for of in first) >= 768


def test_figures_of_a_live_run_by_hand() -> None:
    """Tokens at 1.5, 1.6, 1.9 s of a request of 1 s, and one at 3 s of a request of 2.8 s: 4 tokens in 2 s."""

    def seen(arrival: float, *tokens: float) -> SeenRequest:
        planned = PlannedRequest(RandomPrompt(5, "seen"), len(tokens), arrival)
        return SeenRequest(planned, arrival, 5, Promise(0.4, 0.25), tokens=array("d", tokens))

    found = row("by hand", [seen(1.0, 1.5, 1.6, 1.9), seen(2.8, 3.0)])
    assert (found["P50 TTFT ms"], found["P99 ITL ms"]) == (200, 300)
    assert (found["tokens/s"], found["attainment"]) == (2, 0.5)


def test_what_served_iterations_cost_and_how_they_scatter() -> None:
    """Of a machine that is known, with noise that is known, and an interruption now and then."""
    truth = Coefficients(2e-3, 2e-2, 4e-4, 1e-6, 2e-7, 1e-4, 1.5)
    source, samples = Random(7), []
    for number in range(400):
        f = Features(decodes=1 + number % 9, decode_context=200 * (1 + number % 9))
        f = f.with_chunk(0, 16 + 37 * (number % 11)) if number % 3 == 0 else f
        factor = 10.0 if number % 50 == 0 else source.lognormvariate(0, 0.1)
        samples.append(Sample(f, truth.predict(f) * factor))
    cost, noise = served_as(samples)
    errors = [abs(cost.predict(s.features) / truth.predict(s.features) - 1) for s in samples]
    assert max(errors) < 0.1
    assert noise.sigma == pytest.approx(0.1, rel=0.25)
