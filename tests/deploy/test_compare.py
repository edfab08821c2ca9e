"""`stallfree compare` as a user meets it, on simulated GPUs; and as a library, where things go wrong."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cluster.config import EngineConfig
from cluster.workloads import interference
from deploy import cli
from deploy.bench.monitor import Watcher
from deploy.bench.record import Outcome, RequestRecord
from deploy.bench.slo import SloTargets
from deploy.bench.wanted import Wanted
from deploy.compare import Comparison, Ground, Load, Plan, Session, as_json, compare, configurations, page, simulated_on
from deploy.compare.asked import loads
from deploy.compare.configuration import Configuration
from deploy.compare.excerpt import excerpt, window
from deploy.compare.figure import write_figures
from deploy.compare.html import plots
from deploy.compare.promised import Promises
from deploy.compare.report import loads_of
from deploy.compare.resources import Resources
from deploy.compare.styles import styles
from deploy.errors import CommandError
from tests.deploy.test_simulate import told as told_by

GPU = ["--simulated", "A100-80", "--model", "Llama-3.1-8B"]
BASE = EngineConfig(model="Llama-3.1-8B", groups=2)
FEW = ("whole", "chunked", "slo")


def told(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return told_by(capfd, *GPU, *arguments, command="compare")


def on_gpus(*kinds: str, watch: Any = None, ground: Ground | None = None, long: int = 4096) -> Comparison:
    plan = Plan(BASE, configurations(kinds or FEW, [128]), [Load("", interference(4, long))])
    return compare(plan, ground or simulated_on("A100-80", BASE), watch=watch or (lambda name: lambda _: None))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--configurations", "whole,fastest"], ["--configurations", "fastest", "alternate"]),
        (["--configurations", ","], ["--configurations", "no configuration"]),
        (["--chunk-sizes", "64,many"], ["--chunk-sizes", "many"]),
        (["--chunk-sizes", "0"], ["--chunk-sizes", "'0'"]),
        (["--splits", "2"], ["--splits", "'2'"]),
        (["--splits", "1:0"], ["--splits", "1:0"]),
        (["--workload", "storm"], ["--workload", "storm"]),
        (["--workload", "trace"], ["--trace"]),
        (["--workload", "trace", "--trace", "/no/such/file"], ["/no/such/file"]),
        (["--rates", "1,2"], ["--rates", "interference"]),
        (["--workload", "poisson", "--rates", "1", "--rate", "2"], ["--rates", "--rate"]),
        (["--workload", "poisson", "--rates", "1,fast"], ["--rates", "fast"]),
        (["--workload", "poisson", "--streams", "3"], ["--streams", "poisson"]),
        (["--policy", "slo"], ["--policy"]),
        (["--simulated", "abacus"], ["unknown GPU 'abacus'"]),
        (["--model", "gpt-9"], ["unknown model"]),
        (["--weights", "fp3"], ["fp3"]),
        (["--ttft-ms", "-1"], ["--ttft-ms"]),
        (["--html", "/no/such/folder/a.html"], ["--html", "/no/such/folder"]),
        (["--figures", "/no/such/folder"], ["--figures", "/no/such/folder"]),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli.run(["compare", *GPU, *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words), err


def test_all_configurations_under_one_load(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html, figures = tmp_path / "a.html", tmp_path / "figures"
    figures.mkdir()
    found = told(capfd, "--long", "4096", "--html", str(html), "--figures", str(figures), "--raw")
    by_name = {of["name"]: of for of in found["configurations"]}
    sizes = ["chunked 64", "chunked 128", "chunked 256", "chunked 512"]
    assert list(by_name) == ["alternate 128", "whole", *sizes, "slo", "separated"]
    run_to_the_end = {name: of for name, of in by_name.items() if of["failure"] is None}
    assert run_to_the_end.keys() == by_name.keys()
    assert [of["role"] for of in by_name["separated"]["resources"]["groups"]] == ["prefill", "decode"]
    equal = {json.dumps({**of["resources"], "groups": 0}) for of in run_to_the_end.values()}
    assert len(equal) == 1, "the same ranks and the same KV"
    runs = {name: of["runs"][0] for name, of in run_to_the_end.items()}
    for run in runs.values():
        assert run["finished"] == run["requests"] == run["ttft_ms"]["n"] == run["second_token_ms"]["n"] == 9
        assert run["second_token_ms"]["max"] > run["ttft_ms"]["max"]
        asked = [(request["kind"], request["prompt_tokens"]) for request in run["raw"]]
        assert asked == [("stream", 16)] * 8 + [("long", 4096)]
    assert runs["whole"]["largest_stall_ms"] > 5 * runs["chunked 64"]["largest_stall_ms"]
    assert runs["whole"]["interference"]["ttft_long_ms"] < runs["chunked 64"]["interference"]["ttft_long_ms"]
    assert runs["slo"]["attainment"] == 1
    moved = {name: run["kv_transfer_ms"] for name, run in runs.items() if run["kv_transfer_ms"] is not None}
    assert {name: spread["n"] for name, spread in moved.items()} == {"separated": 9}
    assert runs["separated"]["kv_transfer_bytes"] == (8 + 16) * 256 * 131072, "a block for each stream, 16 for 4,096"
    assert "slo" in found["verdict"]
    assert found["slo"]["ttft_ms_by_prompt_tokens"]["4096"] > found["slo"]["ttft_ms_by_prompt_tokens"]["16"]
    stands_alone(html.read_text(encoding="utf-8"), plots=3 + len(runs))
    drawn = {file.stem: ElementTree.parse(file) for file in figures.glob("*.svg")}
    assert drawn.keys() == {name.replace(" ", "-").replace(":", "-") for name in runs}


def stands_alone(content: str, plots: int) -> None:
    assert content.count('<div class="plot"') == plots
    assert content.count("</script>") == 2
    without_plotly = re.sub(r"<script>.*?</script>", "", content, count=1, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?:""", without_plotly)


def test_a_pool_that_is_given_in_bytes_is_the_same_for_all() -> None:
    base = EngineConfig(model="Llama-3.1-8B", groups=2, kv_memory="8GiB")
    plan = Plan(base, configurations(FEW, [128]), [Load("", interference(4, 512))])
    found = compare(plan, simulated_on("A100-80", base))
    pools = {of.resources.kv_tokens for of in found.compared if of.resources is not None}
    assert (len(found.finished), pools) == (len(FEW), {2**33 // 2**17})


def test_several_splits_of_the_same_groups(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--configurations", "separated", "--groups", "4", "--splits", "1:3,2:2,1:1", "--long", "2048"]
    found = told(capfd, *asked)
    assert [(of["name"], bool(of["failure"])) for of in found["configurations"]] == [
        ("separated 1:3", False), ("separated 2:2", False), ("separated 1:1", True),
    ]  # fmt: skip
    assert "not the 4 of the others" in found["configurations"][2]["failure"]


def test_goodput_against_the_rate(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html = tmp_path / "a.html"
    load = ["--workload", "poisson", "--rates", "4,1", "--duration", "10", "--prompt-tokens", "256:2048"]
    asked = ["--configurations", "whole,slo", "--ttft-ms", "1500", "--tpot-ms", "40"]
    found = told(capfd, *load, *asked, "--html", str(html))
    whole, slo = (of["runs"] for of in found["configurations"])
    assert [run["load"] for run in whole] == [run["load"] for run in slo] == ["1 requests/s", "4 requests/s"]
    assert whole[0]["offered_per_s"] < whole[1]["offered_per_s"]
    for of_whole, of_slo in zip(whole, slo, strict=True):
        assert of_whole["requests"] == of_slo["requests"]
        assert of_slo["attainment"] >= of_whole["attainment"]
        assert of_slo["goodput_per_s"] == pytest.approx(of_slo["attainment"] * of_slo["requests_per_s"], rel=1e-2)
    assert found["slo"] == {"ttft_ms": 1500, "tpot_ms": 40, "ttft_ms_by_prompt_tokens": {}}
    content = html.read_text(encoding="utf-8")
    stands_alone(content, plots=1 + 2 * (3 + 2))
    assert "Goodput against the offered rate" in content


def test_traces_in_both_formats(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"timestamp": 400 * n, "input_length": 900, "output_length": 5, "hash_ids": [n]} for n in range(6)]
    mooncake, azure = tmp_path / "t.jsonl", tmp_path / "t.csv"
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    lines = [f"2024-05-10 00:00:0{n}.5,800,7" for n in range(6)]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    for trace, scaled in ((mooncake, 450), (azure, 400)):
        load = ["--workload", "trace", "--trace", str(trace), "--length-scale", "0.5", "--rates", "1,2"]
        found = told(capfd, *load, "--configurations", "whole,slo", "--raw")
        runs = [run for of in found["configurations"] for run in of["runs"]]
        assert {request["prompt_tokens"] for run in runs for request in run["raw"]} == {scaled}
        assert runs[1]["offered_per_s"] == pytest.approx(2 * runs[0]["offered_per_s"])


def test_a_configuration_that_fails_does_not_end_the_others() -> None:
    class Flaky:
        def __init__(self) -> None:
            self._real = simulated_on("A100-80", BASE)

        @contextmanager
        def open(self, config: EngineConfig) -> Iterator[Session]:
            if config.policy == "whole":
                raise CommandError("no room\nfor it")
            with self._real.open(config) as session:
                yield session

    found = on_gpus(ground=Flaky())
    assert [of.failure for of in found.compared] == ["no room for it", None, None]
    assert not found.interrupted
    assert "whole" not in json.dumps(as_json(found)["verdict"])
    assert "whole was not run: no room for it" in page(found)


def test_nothing_could_be_run(capfd: pytest.CaptureFixture[str]) -> None:
    too_large = ["compare", "--simulated", "A100-80", "--model", "Llama-3.1-70B", "--configurations", "whole,slo"]
    assert cli.run(too_large) == 1
    out, err = capfd.readouterr()
    assert "no room for KV" in out
    assert "No configuration could be run" in out
    assert err.count("no room for KV") == 2


def test_an_interruption_keeps_what_has_finished(tmp_path: Path) -> None:
    def watch(name: str) -> Watcher:
        if name == "chunked 128":
            raise KeyboardInterrupt
        return lambda _: None

    found = on_gpus(watch=watch)
    assert found.interrupted
    assert [of.name for of in found.finished] == ["whole"]
    assert [of.failure is None for of in found.compared] == [True, False, False]
    content = as_json(found)
    assert content["interrupted"] is True
    assert content["verdict"].startswith("Only whole was run to its end")
    assert "interrupted: 1 of 3" in page(found)
    assert [file.name for file in write_figures(found, tmp_path)] == ["whole.svg"]


def test_an_interruption_keeps_the_loads_that_had_ended(tmp_path: Path) -> None:
    def watch(name: str) -> Watcher:
        if name == "slo, third":
            raise KeyboardInterrupt
        return lambda _: None

    workload = interference(2, 1024)
    loads = [Load(name, workload) for name in ("first", "second", "third")]
    plan = Plan(BASE, configurations(["slo", "whole"]), loads)
    found = compare(plan, simulated_on("A100-80", BASE), watch=watch)
    content = as_json(found)
    slo, whole = content["configurations"]
    assert [run["load"] for run in slo["runs"]] == ["first", "second"]
    assert slo["failure"] == whole["failure"] == "interrupted before it had ended"
    assert content["verdict"].startswith("No configuration could be run to its end.")
    written = page(found)
    assert "slo was run under 2 of 3 loads: interrupted" in written
    stands_alone(written, plots=2 * (3 + 1))
    assert [file.name for file in write_figures(found, tmp_path)] == ["slo.svg"]


def test_each_configuration_has_a_look_of_its_own_on_every_plot() -> None:
    asked = configurations(chunk_sizes=[2**n for n in range(4, 12)], splits=[(n, 8 - n) for n in range(1, 8)])
    looks = styles(asked)
    assert len({(look["color"], look["dash"]) for look in looks.values()}) == len(asked) == 18
    usual = styles(configurations())
    assert len({look["color"] for look in usual.values()}) == len(usual) == 8
    plan = Plan(BASE, configurations(FEW, [128]), [Load(name, interference(2, 1024)) for name in "ab"])
    found = compare(plan, simulated_on("A100-80", BASE))
    del found.compared[0].runs[1]  # which must not give its look to the next one
    for _, runs in loads_of(found):
        for plot in plots(found, runs)[:3]:
            drawn = {trace["name"].partition(" (")[0]: trace["line"]["color"] for trace in plot["data"]}
            assert drawn == {compared.name: styles(plan.configurations)[compared.name]["color"] for compared, _ in runs}


def test_the_requests_that_are_drawn_are_the_longest_prompt_and_its_neighbours() -> None:
    def record(number: int, took: float = 1.0, at: float = 0.0) -> RequestRecord:
        prompt = 900 if number == 20 else 10
        return RequestRecord("r", at + number, at + number, (), at + number + took, prompt, 1, Outcome.FINISHED)

    records = [record(number) for number in range(40)]
    assert [each.due_s for each in excerpt(records)] == list(range(14, 26))
    assert excerpt(records[:3]) == records[:3]
    assert [each.due_s for each in excerpt(records[19:])] == list(range(19, 31))
    assert window([excerpt(records)]) == (14, 26)
    assert window([records[:3], [record(0, took=100.0)]]) == (0.0, 9.0), "the slow one is cut"
    assert window([[]]) == (0.0, 1.0)


async def test_ctrl_c_reports_and_exits_with_130() -> None:
    load = ["--workload", "poisson", "--rate", "20", "--duration", "30", "--configurations", "chunked"]
    command = [sys.executable, "-m", "deploy.cli", "compare", *GPU, *load, "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    seen = []
    while not re.search(rb"chunked 128 .2 of 4", line := await process.stderr.readline()):
        assert line, seen
        seen.append(line)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"] is True
    ended = [of["name"] for of in found["configurations"] if of["failure"] is None]
    assert ended[:1] == ["chunked 64"]
    assert len(ended) < 4


def test_configurations_and_what_they_ask_of_the_engine() -> None:
    names = [of.name for of in configurations(["slo", "chunked", "slo"], [8, 16], alternate_chunk=4)]
    assert names == ["slo", "chunked 8", "chunked 16"]
    chunked = Configuration("chunked", 16).engine(EngineConfig(groups=2, num_blocks=7))
    assert (chunked.policy, chunked.chunk_size, chunked.groups, chunked.num_blocks) == ("chunked", 16, 2, 7)
    with pytest.raises(ValueError, match="separated"):
        Configuration("separated").engine(EngineConfig(groups=1))


def test_the_resources_are_told_exactly() -> None:
    base = EngineConfig(model="Llama-3.1-8B", groups=2, tp=2, num_blocks=100, block_size=16)
    with simulated_on("H100", base).open(base) as session:
        assert session.resources.describe() == (
            "2 colocated x tp 2: 4 ranks on H100 (simulated), KV for 3,200 tokens in all"
        )
    served = Resources(session.resources.groups, 1, 1600, "cpu")
    assert "4 ranks of 1 thread on cpu" in served.describe()


def test_promises_are_those_of_the_prompt_and_travel_with_the_request() -> None:
    promises = Promises.of({100, 10}, lambda tokens: SloTargets(tokens / 100, 0.05, None))
    assert promises.common == SloTargets(None, 0.05, None)
    assert promises.ttft_by_length == {10: 0.1, 100: 1.0}
    assert promises.of_prompt(11) == promises.of_prompt(100) == promises.of_prompt(1000)
    asked = promises.asked_in(interference(1, 100, prompt_lengths=None))
    assert [request.extra["slo"]["ttft_ms"] for request in asked.requests] == [1000, 1000]
    assert Promises.of({10}, lambda tokens: SloTargets()).asked_in(interference(1, 100)) == interference(1, 100)


def test_the_same_requests_at_every_rate() -> None:
    slow, fast = loads("poisson", Wanted(prompt_tokens="1:999", duration=5), "2,1", seed=3)
    assert (slow.name, fast.name) == ("1 requests/s", "2 requests/s")
    shared = min(len(slow.workload.requests), len(fast.workload.requests))
    assert [r.prompt for r in slow.workload.requests[:shared]] == [r.prompt for r in fast.workload.requests[:shared]]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_draws_the_page_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    file.write_text(page(on_gpus()), encoding="utf-8")
    offline = ["--no-sandbox", "--headless", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    home = ["--user-data-dir=" + str(tmp_path / "profile"), "--virtual-time-budget=10000"]
    command = ["chromium", *offline, *home, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.stdout.count("main-svg") >= 6, done.stderr
