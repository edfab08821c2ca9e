"""`stallfree simulate` as a user meets it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy import cli

FEW = ["--model", "Llama-3.1-8B", "--gpu", "A100", "--rate", "2", "--duration", "20", "--ttft-ms", "2000"]


def told(capfd: pytest.CaptureFixture[str], *arguments: str, command: str = "simulate") -> Any:
    standard_output = os.dup(1)  # the command gives it to standard error for good, to keep JSON clean
    try:
        assert cli.run([command, *arguments, "--json"]) == 0
    finally:
        os.dup2(standard_output, 1)
        os.close(standard_output)
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "A100", "--mode", "separated", "--groups", "2"], ["--groups", "--prefill-groups"]),
        (["--gpu", "A100", "--mode", "separated", "--decode-tp", "2"], ["--decode-tp", "one tensor-parallel degree"]),
        (["--find-cheapest", "--mode", "separated"], ["--find-cheapest", "separated"]),
        (["--gpu", "A100", "--mode", "sideways"], ["sideways"]),
        (["--gpu", "abacus"], ["unknown GPU 'abacus'"]),
        ([], ["--gpu"]),
        (["--gpu", "A100", "--model", "gpt-9"], ["unknown model"]),
        (["--gpu", "A100", "--model", "Llama-3.1-70B"], ["no room for KV", "--tp"]),
        (["--gpu", "A100", "--model", "Llama-3.1-8B", "--tp", "16"], ["--tp 16", "8 KV heads"]),
        (["--gpu", "A100", "--policy", "fastest"], ["--policy"]),
        (["--gpu", "A100", "--workload", "nope"], ["--workload", "poisson"]),
        (["--gpu", "A100", "--workload", "fixed", "--burstiness", "2"], ["--burstiness", "fixed"]),
        (["--gpu", "A100", "--workload", "trace"], ["--trace"]),
        (["--gpu", "A100", "--rate", "fast"], ["--rate", "fast"]),
        (["--gpu", "A100", "--weights", "fp3"], ["fp3", "bf16"]),
        (["--gpu", "A100", "--calibration", "/no/such/file"], ["--calibration"]),
        (["--calibration", "/no/such/file"], ["/no/such/file"]),
        (["--gpu", "A100", "--lengths", "/no/such/file"], ["--lengths"]),
        (["--gpu", "A100", "--streams", "3"], ["--streams", "poisson"]),
        (["--gpu", "A100", "--find-capacity", "--rate", "2"], ["--rate"]),
        (["--gpu", "A100", "--find-capacity", "--workload", "ramp"], ["--find-capacity", "poisson"]),
        (["--gpu", "A100", "--find-capacity", "--attainment", "90"], ["attainment"]),
        (["--gpu", "A100", "--find-capacity", "--p99-tbt-ms", "0"], ["above 0", "0 ms"]),
        (["--gpu", "A100", "--find-capacity", "--p99-tbt-ms", "nan"], ["above 0", "nan"]),
        (["--gpu", "A100", "--find-capacity", "--delay-ms", "-1"], ["at least 0", "-1 ms"]),
        (["--gpu", "A100", "--attainment", "2"], ["--attainment has no meaning", "--find-capacity"]),
        (["--gpu", "A100", "--p99-tbt-ms", "50"], ["--p99-tbt-ms has no meaning"]),
        (["--gpu", "A100", "--delay-ms", "-1"], ["--delay-ms has no meaning"]),
        (["--gpu", "A100", "--seeds", "2"], ["--seeds has no meaning", "--find-capacity"]),
        (["--gpu", "A100", "--tps", "1"], ["--tps has no meaning", "--find-cheapest"]),
        (["--gpu", "A100", "--find-capacity", "--most-gpus", "8"], ["--most-gpus has no meaning"]),
        (["--find-cheapest", "--seeds", "2"], ["--seeds has no meaning"]),
        (["--find-cheapest", "--gpus", ""], ["--gpus"]),
        (["--find-capacity", "--find-cheapest"], ["two questions"]),
        (["--find-cheapest", "--gpu", "A100"], ["--gpus"]),
        (["--find-cheapest", "--gpus", "abacus"], ["abacus"]),
        (["--find-cheapest", "--tps", "1,two"], ["--tps", "two"]),
        (["--find-cheapest", "--policies", "fastest"], ["--policies", "fastest"]),
        (["--find-cheapest", "--prices", "/no/such/prices.json"], ["--prices"]),
        (["--gpu", "A100", "--html", "/no/such/folder/x.html"], ["--html"]),
        (["--gpu", "A100", "--totals", "--raw"], ["--totals", "--raw"]),
        (["--gpu", "A100", "--totals", "--find-capacity"], ["--totals", "search"]),
        (["--gpu", "A100", "--totals", "--workload", "concurrency"], ["--totals", "poisson"]),
        (["--gpu", "A100", "--totals", "--workload", "fixed", "--burstiness", "2"], ["--burstiness", "fixed"]),
        (["--gpu", "A100", "--totals", "--streams", "3"], ["--streams", "poisson"]),
        (["--gpu", "A100", "--totals", "--rate", "1000", "--duration", "100000"], ["at most 1,000,000"]),
        (["--gpu", "A100", "--totals", "--rate", "0.001", "--duration", "1"], ["no request comes"]),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    model = [] if "--model" in arguments else ["--model", "Llama-3.1-8B"]
    assert cli.run(["simulate", *model, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(word in err for word in words)


@pytest.mark.parametrize("workload", ["poisson", "gamma", "fixed"])
def test_the_figures_of_a_run(capfd: pytest.CaptureFixture[str], workload: str) -> None:
    found = told(capfd, *FEW, "--tpot-ms", "50", "--workload", workload, "--policy", "slo")
    assert found["requests"] == found["finished"] > 10
    assert found["attainment"] == 1.0
    assert found["goodput_per_s"] == found["requests_per_s"] > 1
    assert found["ttft_ms"]["n"] == found["requests"]
    assert found["itl_ms"]["n"] == found["output_tokens"] - found["requests"] == 63 * found["requests"]
    assert found["largest_stall_ms"] == found["itl_ms"]["max"]
    assert found["simulated"]["gpus"] == 1
    assert found["simulated"]["prefill_tokens"] == 256 * found["requests"]
    assert found["simulated"]["mean_budget_tokens"] > 0
    assert found["slo"] == {"ttft_ms": 2000, "tpot_ms": 50}
    again = told(capfd, *FEW, "--tpot-ms", "50", "--workload", workload, "--policy", "slo")
    assert again["itl_ms"] == found["itl_ms"], "the same seed, the same run"


@pytest.mark.parametrize("workload", ["poisson", "gamma", "fixed", "ramp"])
def test_totals_of_a_run_are_those_of_its_requests(capfd: pytest.CaptureFixture[str], workload: str) -> None:
    asked = [*FEW, "--tpot-ms", "14", "--workload", workload, "--prompt-tokens", "64:3000", "--policy", "chunked"]
    if workload == "ramp":
        asked[asked.index("--rate") + 1] = "1:6"
    whole, rough = told(capfd, *asked), told(capfd, *asked, "--totals")
    for name in ("requests", "finished", "prompt_tokens", "output_tokens", "attainment", "errors", "largest_stall_ms"):
        assert rough[name] == whole[name], name
    assert 0 < whole["attainment"] < 1
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert rough[name]["n"] == whole[name]["n"]
        assert rough[name]["mean"] == pytest.approx(whole[name]["mean"], abs=0.002)
        assert rough[name]["max"] == whole[name]["max"]
    assert rough["itl_ms"]["p99"] == pytest.approx(whole["itl_ms"]["p99"], rel=0.01)
    timing = ("wall_s", "iterations_per_wall_s", "median_scheduling_delay_ms")
    assert {**rough["simulated"], **dict.fromkeys(timing)} == {**whole["simulated"], **dict.fromkeys(timing)}


def test_separated_groups_and_their_transfers(capfd: pytest.CaptureFixture[str]) -> None:
    lanes = ["--mode", "separated", "--decode-groups", "2", "--prompt-tokens", "2000"]
    found = told(capfd, *FEW, *lanes)
    assert found["finished"] == found["requests"] > 10
    assert found["simulated"]["gpus"] == 3
    moved = found["simulated"]["kv_transfers"]
    assert moved["count"] == found["requests"]
    assert moved["bytes"] == found["requests"] * 8 * 256 * 131072, "2,000 tokens are 8 blocks"
    assert 0 < moved["early_share"] < 1
    assert told(capfd, *FEW)["simulated"]["kv_transfers"] is None


def test_a_long_prompt_into_running_streams(capfd: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "interference", "--streams", "3", "--long", "4096", "--policy", "whole"]
    found = told(capfd, "--model", "Llama-3.1-8B", "--gpu", "A100", *load)
    assert found["finished"] == 4
    seen = found["interference"]
    assert (seen["streams"], seen["running"]) == (3, 3)
    assert seen["gaps_during_ms"]["max"] > 10 * seen["gaps_before_ms"]["p50"]


def test_a_trace_and_a_closed_loop(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"timestamp": 500 * n, "input_length": 700 + n, "output_length": 5, "hash_ids": [0, n]} for n in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    few = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--groups", "2"]
    found = told(capfd, *few, "--workload", "trace", "--trace", str(trace))
    assert found["finished"] == 60
    assert found["simulated"]["gpus"] == 2
    searched = told(
        capfd,
        *few,
        "--workload",
        "trace",
        "--trace",
        str(trace),
        "--find-capacity",
        "--ttft-ms",
        "300",
        "--tpot-ms",
        "20",
    )
    assert searched["capacity"]["requests_per_s"] > 2
    found = told(capfd, *few, "--workload", "concurrency", "--requests", "12", "--concurrency", "3", "--raw")
    assert found["finished"] == len(found["raw"]) == 12


def test_lengths_of_a_table(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n700,3,1\n900,5,1\n")
    found = told(capfd, *FEW, "--lengths", str(table), "--raw")
    drawn = {(request["prompt_tokens"], request["asked_tokens"]) for request in found["raw"]}
    assert drawn == {(700, 3), (900, 5)}
    table.write_text("num_prefill_tokens,num_decode_tokens\n700,many\n")
    assert cli.run(["simulate", *FEW, "--lengths", str(table)]) == 2
    assert "line 2" in capfd.readouterr().err


def test_a_report(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    assert cli.run(["simulate", *FEW, "--policy", "whole", "--html", str(page)]) == 0
    out = capfd.readouterr().out
    assert "TTFT" in out
    assert "iterations" in out
    assert "<html" in page.read_text()


def test_a_server_s_own_calibration(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Coefficients by which one token takes 20 ms whatever it is: 4 tokens, the first with the prompt."""
    engine = {
        "model": "mine", "model_dir": "", "served_model_name": "mine", "max_model_len": 4096, "vocab_size": 1000,
        "block_size": 16, "num_blocks": 500, "tp": 1, "groups": 1, "policy": "slo", "chunk_size": 512, "device": "cpu",
        "dtype": "float32", "attention": "cpu", "transport": "actor", "something": "of a later version",
    }  # fmt: skip
    zero = dict.fromkeys(("read", "per_token", "per_context", "per_pair", "per_sequence"), 0.0)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"engine": engine, "coefficients": {**zero, "overhead": 0.02, "norm": 2.0}}))
    found = told(
        capfd, "--calibration", str(file), "--workload", "concurrency", "--requests", "3", "--concurrency", "1",
        "--output-tokens", "4", "--prompt-tokens", "100", "--policy", "chunked",
    )  # fmt: skip
    assert found["ttft_ms"]["p50"] == pytest.approx(20)
    assert found["tpot_ms"]["max"] == pytest.approx(20)
    file.write_text("{}")
    assert cli.run(["simulate", "--calibration", str(file)]) == 2
    assert "no calibration" in capfd.readouterr().err


def test_the_cheapest_by_gpus_and_by_price(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"A100": 1.0, "H100": 100.0}')
    asked = [
        "--model", "Llama-3.1-8B", "--find-cheapest", "--rate", "12", "--duration", "10", "--prompt-tokens", "2000",
        "--output-tokens", "8", "--ttft-ms", "500", "--tpot-ms", "60", "--policies", "chunked", "--tps", "1",
    ]  # fmt: skip
    by_count = told(capfd, *asked)
    assert by_count["cheapest"]["gpu"] == "H100"
    assert [offer["gpus"] for offer in by_count["offers"]] == sorted(offer["gpus"] for offer in by_count["offers"])
    assert by_count["cheapest"]["price_per_hour"] is None
    by_price = told(capfd, *asked, "--prices", str(prices))
    assert by_price["cheapest"]["gpu"] == "A100-80"
    assert by_price["cheapest"]["price_per_hour"] == by_price["cheapest"]["gpus"]
