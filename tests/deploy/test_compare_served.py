"""A comparison on real workers: a server of its own for each configuration, one after another, over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from cluster.config import EngineConfig
from cluster.workloads import interference
from deploy.app import NAMESPACE
from deploy.bench import RunRecord
from deploy.compare import Load, Plan, Session, as_json, compare, configurations
from deploy.compare.figure import write_figures
from deploy.compare.ground import Transfers
from deploy.compare.served import ServedGround, during, transfers
from deploy.ports import check_port
from deploy.running import APPLICATION, Address


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> Iterator[Address]:
    address = Address("127.0.0.1", check_port("127.0.0.1", 0))
    serve.start(http_options=HTTPOptions(host=address.host, port=address.port))
    yield address
    serve.shutdown()


def test_a_small_comparison(address: Address, tiny_model_dir: Path, tmp_path: Path) -> None:
    base = EngineConfig(
        model=str(tiny_model_dir),
        groups=2,
        num_blocks=80,
        chunk_size=64,
        profile_seconds=0,
        ttft_ms=60_000,
        tpot_ms=60_000,
    )
    load = interference(3, 300, lead=4, tail=4)
    schedulers: list[str] = []

    class Watched(ServedGround):
        @contextmanager
        def open(self, config: EngineConfig) -> Iterator[Session]:
            with super().open(config) as session:
                actors = ray.util.list_named_actors(all_namespaces=True)
                schedulers.extend(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
                yield session

    asked = configurations(["whole", "separated"])
    found = compare(Plan(base, asked, [Load("", load)]), Watched(address))
    assert [(of.name, of.failure) for of in found.compared] == [("whole", None), ("separated", None)]
    assert len(set(schedulers)) == len(schedulers) == 2, "each has an engine of its own"
    assert found.warnings == []
    for of in found.compared:
        assert of.resources is not None
        assert (of.resources.ranks, of.resources.total_kv_tokens) == (2, 2 * 80 * 16)
        assert of.resources.threads == max(1, (os.cpu_count() or 1) // 2)
        (run,) = of.runs
        assert (run.figures.finished, run.figures.met, run.second_token.n) == (4, 4, 4)
        assert [record.prompt_tokens for record in run.record.requests] == [16, 16, 16, 300]
        computed = sum(step.prefill_tokens for step in run.steps)
        assert computed >= 300 + 3 * 16, "nothing of it was cached, in either"
        assert {step.group for step in run.steps} == {0, 1}
    whole, separated = (of.runs[0] for of in found.compared)
    assert max(step.prefill_tokens for step in whole.steps) >= 300
    assert max(step.prefill_tokens for step in separated.steps) == 64
    assert not any(step.decodes for step in separated.steps if step.group == 0)
    assert not any(step.prefill_tokens for step in separated.steps if step.group == 1)
    assert (whole.transfers, separated.transfer.n) == (None, 4)
    told = as_json(found)["configurations"][1]["runs"][0]
    assert (told["kv_transfer_ms"]["n"], told["second_token_ms"]["n"], told["attainment"]) == (4, 4, 1.0)
    assert told["kv_transfer_bytes"] >= 348 * 3 * 2 * 3 * 8 * 4, "3 layers, K and V, 3 heads of 8 numbers of 4 bytes"
    files = write_figures(found, tmp_path)
    assert [file.name for file in files] == ["whole.svg", "separated.svg"]
    assert separated.transfers is not None
    assert all(0 <= begun <= ended <= separated.record.duration_s for begun, ended in separated.transfers.spans)
    assert all(f">{lane}<" in files[1].read_text() for lane in ("prefill", "KV", "decode"))
    assert APPLICATION not in serve.status().applications
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{address.url}/health", trust_env=False).raise_for_status()


def test_transfers_are_those_of_the_run() -> None:
    run = RunRecord((), duration_s=2.0, started_at=100.0, open_loop=True)
    moved = {"request": "a", "bytes": 4096, "send_ms": 1.5, "wait_ms": 2.0, "sends": [[100_250.0, 100_500.0]]}
    times = [(99_000.0, 500.0), (99_900.0, 200.0), (101_000.0, 10.0), (102_500.0, 10.0)]
    log = [{"start_ms": start, "actual_ms": took, "transfers": [moved]} for start, took in times]
    log[2]["transfers"] = [moved, moved]
    del log[1]["transfers"]
    assert during(log, run) == log[1:3]
    assert transfers(during(log, run), 100.0) == Transfers((0.0015, 0.0015), 8192, ((0.25, 0.5), (0.25, 0.5)))


@pytest.mark.slow
def test_one_that_cannot_be_started_is_told_and_the_next_one_runs(address: Address, tiny_model_dir: Path) -> None:
    """A decode kernel that is not there on a CPU: found out by the workers, as late as can be."""
    base = EngineConfig(model=str(tiny_model_dir), num_blocks=80, profile_seconds=0, ttft_ms=60_000, tpot_ms=60_000)

    class Flawed(ServedGround):
        @contextmanager
        def open(self, config: EngineConfig) -> Iterator[Session]:
            flawed = config.model_copy(update={"attention": "flash_attn"}) if config.policy == "whole" else config
            with super().open(flawed) as session:
                yield session

    load = Load("", interference(1, 40, lead=2, tail=2))
    found = compare(Plan(base, configurations(["whole", "chunked"], [64]), [load]), Flawed(address))
    whole, chunked = found.compared
    assert whole.failure is not None
    assert "\n" not in whole.failure
    assert chunked.failure is None
    assert chunked.runs[0].figures.finished == 2


def interrupted(model: Path, page: Path, at: str, *options: str) -> tuple[dict[str, Any], str]:
    """What is told after Ctrl-C at the first line of progress that matches."""
    asked = ["--num-blocks", "200", "--profile-seconds", "0", "--ttft-ms", "60000", "--tpot-ms", "60000", "--json"]
    command = [sys.executable, "-m", "deploy.cli", "compare", "--model", str(model), *asked, *options]
    with subprocess.Popen(
        [*command, "--html", str(page)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(re.search(at, line) for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    return json.loads(out), err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_everything_and_keeps_what_had_finished(tiny_model_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    load = ["--streams", "2", "--long", "200", "--configurations", "whole,chunked"]
    told, _ = interrupted(tiny_model_dir, page, "chunked 64 .2 of", *load)
    assert told["verdict"].startswith("Only whole was run to its end")
    assert [len(of["runs"]) for of in told["configurations"]] == [1, 0, 0, 0, 0]
    assert "interrupted: 1 of 5" in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", ["starting Ray", "loading"])
def test_ctrl_c_before_anything_was_run(tiny_model_dir: Path, tmp_path: Path, at: str) -> None:
    page = tmp_path / "a.html"
    page.write_text("of an earlier run")
    told, err = interrupted(tiny_model_dir, page, at, "--configurations", "whole,slo")
    assert told["interrupted"] is True
    assert [of["failure"] for of in told["configurations"]] == ["interrupted before it had ended"] * 2
    assert page.read_text() == "of an earlier run"
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_in_the_first_configuration_keeps_the_loads_that_had_ended(tiny_model_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    load = [
        "--workload",
        "poisson",
        "--duration",
        "3",
        "--rates",
        "3,4,5",
        "--prompt-tokens",
        "9:99",
        "--configurations",
        "whole,slo",
    ]
    told, _ = interrupted(tiny_model_dir, page, r"whole, 4 requests/s: \d+ requests in", *load)
    runs = [[run["load"] for run in of["runs"]] for of in told["configurations"]]
    assert runs[0] == ["3 requests/s", "4 requests/s"]
    assert not any(runs[1:])
    assert "whole was run under 2 of 3 loads: interrupted" in page.read_text(encoding="utf-8")
