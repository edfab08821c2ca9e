"""`stallfree bench` as a user meets it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.bench.wanted import TAKES
from tests.deploy.bench_server import Body, Reply, fake, speak
from tests.deploy.test_cli import complaint

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["URL", "http://"]),
        (["localhost:8000"], ["not a URL", "localhost:8000"]),
        ([NOWHERE, "--workload", "storm"], ["--workload", "poisson", "storm"]),
        ([NOWHERE, "--rate", "fast"], ["--rate", "fast"]),
        ([NOWHERE, "--rate", "0"], ["rate", "above 0"]),
        ([NOWHERE, "--rate", "nan"], ["rate", "above 0"]),
        ([NOWHERE, "--rate", "1:8"], ["--rate", "1:8"]),
        ([NOWHERE, "--rate", "1e9"], ["requests", "at most"]),
        ([NOWHERE, "--rate", "0.001", "--duration", "0.001"], ["no request", "--rate"]),
        ([NOWHERE, "--duration", "0"], ["duration", "above 0"]),
        ([NOWHERE, "--workload", "ramp", "--rate", "3"], ["--rate", "1:8"]),
        ([NOWHERE, "--workload", "gamma", "--burstiness", "0"], ["burstiness", "above 0"]),
        ([NOWHERE, "--burstiness", "2"], ["--burstiness", "poisson"]),
        ([NOWHERE, "--workload", "interference", "--max-prompt", "2"], ["--max-prompt", "interference"]),
        ([NOWHERE, "--workload", "concurrency", "--concurrency", "0"], ["--concurrency"]),
        ([NOWHERE, "--prompt-tokens", "9:3"], ["--prompt-tokens", "9:3"]),
        ([NOWHERE, "--output-tokens", "some"], ["--output-tokens", "some"]),
        ([NOWHERE, "--workload", "trace"], ["--trace"]),
        ([NOWHERE, "--workload", "trace", "--trace", "/no/such/file"], ["/no/such/file"]),
        ([NOWHERE, "--slo", "soon"], ["ttft_ms", "soon"]),
        ([NOWHERE, "--send-slo"], ["--send-slo", "--slo"]),
        ([NOWHERE, "--extra-body", "[1]"], ["--extra-body", "[1]"]),
        ([NOWHERE, "--endpoint", "edits"], ["endpoint", "edits"]),
        ([NOWHERE, "--html", "/no/such/folder/a.html"], ["--html", "/no/such/folder"]),
        ([NOWHERE, "--output", "/no/such/folder/a.json"], ["--output", "/no/such/folder"]),
        ([NOWHERE, "--skip", "-1"], ["--skip"]),
        (["--diff", "a.json"], ["--diff", "2"]),
        (["--diff", "/no/a.json", "/no/b.json"], ["--diff", "/no/a.json"]),
        ([NOWHERE, "--diff", "a.json", "b.json"], ["--diff", "URL"]),
    ],
)
def test_a_wrong_call_is_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    line = complaint(capfd, "bench", *arguments, code=2)
    assert all(word in line for word in words), line


def test_a_server_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert url in complaint(capfd, "bench", url, "--duration", "3", code=1)


async def bench(*arguments: str) -> int:
    return await asyncio.to_thread(cli.run, ["bench", *arguments])


def contents(file: str) -> Any:
    return Path(file).read_text()


async def test_a_run_its_files_and_its_comparison(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "a.html")]
    load = ["--rate", "60", "--duration", "0.5", "--prompt-tokens", "4:9", "--output-tokens", "3"]
    slo = ["--slo", "ttft_ms=60000,tpot_ms=60000", "--send-slo", "--extra-body", '{"top_p": 0.5}']
    async with fake() as server:
        assert await bench(server.url, *load, *slo, "--output", files[0], "--html", files[2], "--warmup", "2") == 0
        printed = capfd.readouterr().out
        assert await bench(f"{server.url}/v1", *load, "--json", "--raw", "--output", files[1], "--seed", "1") == 0
        out = capfd.readouterr().out
    assert "attainment 100.0%" in printed
    assert server.bodies[0]["slo"] == {"ttft_ms": 60000.0, "tpot_ms": 60000.0}
    assert (server.bodies[0]["top_p"], "top_p" in server.bodies[-1]) == (0.5, False)
    first, second, shown = (contents(file) for file in files)
    first, second = json.loads(first), json.loads(second)
    assert json.loads(out) == second
    assert first["goodput_per_s"] == first["requests_per_s"] > 0
    assert first["target"]["workload"] == "poisson"
    assert len(second["raw"]) == second["requests"] == second["ttft_ms"]["n"]
    assert "Plotly.newPlot" in shown
    assert await bench("--diff", *files[:2]) == 0
    assert "B / A" in capfd.readouterr().out


WORKLOADS: dict[str, list[str]] = {
    "poisson": ["--rate", "40", "--duration", "0.3", "--shared-prefix", "8"],
    "gamma": ["--rate", "40", "--duration", "0.3", "--burstiness", "0.5"],
    "ramp": ["--rate", "10:80", "--duration", "0.3"],
    "concurrency": ["--concurrency", "3", "--requests", "9"],
    "interference": ["--streams", "3", "--long", "50", "--output-tokens", "30"],
    "trace": ["--rate-scale", "10", "--length-scale", "0.1", "--max-prompt", "9", "--max-requests", "2"],
}


@pytest.mark.parametrize("workload", TAKES)
async def test_every_workload(capfd: pytest.CaptureFixture[str], tmp_path: Path, workload: str) -> None:
    options = WORKLOADS[workload]
    if workload == "trace":
        row = {"timestamp": 1000, "input_length": 100, "output_length": 30, "hash_ids": [1]}
        (tmp_path / "t.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        options = [*options, "--trace", str(tmp_path / "t.jsonl")]
    async with fake() as server:
        assert await bench(server.url, "--workload", workload, *options, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["finished"] == found["planned"] == len(server.bodies) > 0
    assert found["errors"] == {}
    assert found["target"]["workload"] == workload
    if workload == "trace":
        assert [len(body["prompt"]) for body in server.bodies] == [9, 9]
    if workload == "interference":
        assert found["interference"]["streams"] == 3


async def test_errors_are_figures_and_no_failure_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    async def busy(body: Body, reply: Reply) -> None:
        await reply.json(429, {"error": {"message": "queue full", "code": "queue_full"}})

    async with fake(busy) as server:
        options = ["--workload", "concurrency", "--requests", "4", "--slo", "ttft_ms=1000"]
        assert await bench(server.url, *options) == 0
    printed = capfd.readouterr().out
    assert "4 x 429" in printed
    assert "attainment 0.0%" in printed
    assert len(server.bodies) == 4


async def test_ctrl_c_keeps_what_was_seen() -> None:
    third = asyncio.Event()

    async def hang_at_the_third(body: Body, reply: Reply) -> None:
        if len(server.bodies) < 3:
            await speak(body, reply)
            return
        third.set()
        await asyncio.Event().wait()

    async with fake(hang_at_the_third) as server:
        command = [sys.executable, "-m", "deploy.cli", "bench", server.url, "--json"]
        options = ["--workload", "concurrency", "--concurrency", "1", "--requests", "9"]
        environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        process = await asyncio.create_subprocess_exec(
            *command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
        )
        await third.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130, err
    found: dict[str, Any] = json.loads(out)
    assert (found["interrupted"], found["finished"], found["unfinished"]) == (True, 2, 1)


async def test_the_real_server(capfd: pytest.CaptureFixture[str], server_url: str) -> None:
    load = ["--workload", "concurrency", "--concurrency", "2", "--requests", "4", "--prompt-tokens", "20"]
    assert await bench(server_url, *load, "--output-tokens", "5", "--json", "--endpoint", "chat") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["finished"], found["output_tokens"], found["warnings"]) == (4, 20, [])
    assert found["prompt_tokens"] > 4 * 20
