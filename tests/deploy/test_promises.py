"""What a served engine promises, refuses, relaxes and shows of its decisions, over HTTP on the real model."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from deploy.cli import run
from deploy.trace import chrome_trace
from scheduler.gate import OnInfeasible
from tests.deploy.chrome import check_trace
from tests.deploy.conftest import MODEL, in_process, served
from tests.deploy.wire import error_of
from workers.tokenizer import Tokenizer

HOPELESS = {"ttft_ms": 1, "tpot_ms": 60_000}
EASY = {"ttft_ms": 600_000, "tpot_ms": 60_000}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
CONFIG = EngineConfig(model=MODEL, num_blocks=200, max_model_len=1024, profile_seconds=2)


@asynccontextmanager
async def engine_with(on_infeasible: OnInfeasible, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    engine = await LocalEngine.start(CONFIG.model_copy(update={"on_infeasible": on_infeasible}))
    async with in_process(create_api(engine, tokenizer)) as client:
        yield client
    await engine.close()


@pytest_asyncio.fixture(scope="module")
async def url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    engine = await LocalEngine.start(CONFIG)
    async with served(create_api(engine, tokenizer)) as address:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            for slo in ("interactive", "batch"):
                await client.completions.create(**{**BODY, "extra_body": {"slo": slo}})
        yield address
    await engine.close()


async def test_rejected_with_the_prediction_and_told_not_to_come_back_with_what_cannot_be(tokenizer: Tokenizer) -> None:
    async with engine_with("reject", tokenizer) as client:
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={**BODY, "slo": HOPELESS, "stream": stream})
            error = error_of(answer, 429)
            assert error["code"] == "slo_infeasible"
            assert error["type"] == "rate_limit_error"
            assert "is predicted in" in error["message"]
            assert "1 ms are promised" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.post("/v1/completions", json={**BODY, "slo": EASY})).status_code == 200
        assert (await client.get("/health")).status_code == 200, "health checks are promised nothing"


async def test_relaxed_and_told_so(tokenizer: Tokenizer) -> None:
    async with engine_with("relax", tokenizer) as client:
        plain = await client.post("/v1/completions", json={**BODY, "slo": EASY})
        assert "slo" not in plain.json()
        assert "x-slo-granted" not in plain.headers
        answer = await client.post("/v1/completions", json={**BODY, "slo": HOPELESS})
        granted = answer.json()["slo"]
        assert json.loads(answer.headers["x-slo-granted"]) == granted
        assert granted["ttft_ms"] >= granted["predicted_ttft_ms"] > 1
        assert granted["tpot_ms"] == 60_000
        assert granted["tbt_ms"] is None
        assert granted["best_effort"] is False
        assert answer.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]
        streamed = await client.post("/v1/completions", json={**BODY, "slo": HOPELESS, "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert [index for index, event in enumerate(events) if "slo" in event] == [0]
        assert json.loads(streamed.headers["x-slo-granted"]) == events[0]["slo"]
        assert "".join(event["choices"][0]["text"] for event in events) == plain.json()["choices"][0]["text"]


async def test_best_effort_is_the_default_and_told_so(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        answer = await client.post("/v1/completions", json={**BODY, "slo": HOPELESS, "n": 2})
        assert answer.status_code == 200
        assert answer.json()["slo"]["best_effort"] is True
        assert answer.json()["slo"]["ttft_ms"] is None
        assert len(answer.json()["choices"]) == 2
        figures = (await client.get("/metrics")).text
        assert 'slo_class="best_effort"' in figures
        assert 'slo_class="interactive"' in figures


async def test_what_it_promises_can_be_asked(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        promises = (await client.get("/v1/stallfree/promises")).json()
    fastest = promises["smallest_tpot_ms"]
    assert 0 < fastest["1"] <= fastest["8"] <= fastest["32"]
    assert promises["tpot_ms"] == pytest.approx(2.5 * fastest["8"], rel=0.01), "context 512 in both"
    assert promises["tbt_ms"] == pytest.approx(2 * promises["tpot_ms"], rel=0.01)
    rows = promises["ttft"]
    assert [row["prompt_tokens"] for row in rows] == [128, 512]
    assert all(row["feasible"] and row["ttft_ms"] <= row["promised_ttft_ms"] for row in rows)
    assert promises["feasible"] is True
    assert promises["longest_prompt"] == 1023


async def test_an_operator_who_promises_too_much_is_told_what_would_do(tokenizer: Tokenizer) -> None:
    engine = await LocalEngine.start(CONFIG.model_copy(update={"ttft_ms": 5.0, "tpot_ms": 5000.0}))
    outlook = engine.info.outlook
    await engine.close()
    assert outlook is not None
    assert outlook.ways_out is not None
    assert outlook.ways_out.binding == "ttft"
    assert outlook.ways_out.prompt_tokens == 128
    assert outlook.ways_out.ttft_ms is not None
    assert outlook.ways_out.ttft_ms > 5
    assert not outlook.as_json()["feasible"]


async def test_decisions_are_read_in_pages(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        latest = (await client.get("/v1/stallfree/iterations", params={"limit": 3})).json()["data"]
        assert len(latest) == 3
        assert latest[-1]["seq"] == latest[0]["seq"] + 2
        after = (await client.get("/v1/stallfree/iterations", params={"after": latest[0]["seq"]})).json()["data"]
        assert after[:2] == latest[1:]
        for params in ({"limit": 0}, {"limit": "x"}, {"after": -2}, {"limit": 10**9}):
            error = error_of(await client.get("/v1/stallfree/iterations", params=params), 400)
            assert error["param"] in params


async def test_a_trace_has_a_track_for_each_request_and_the_budget(url: str, tmp_path: Path) -> None:
    import asyncio

    path = tmp_path / "trace.json"
    assert await asyncio.to_thread(run, ["trace", url, "--output", str(path)]) == 0
    events = check_trace(json.loads(path.read_text()))
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1
    }
    assert len(names) >= 2
    assert all(name.startswith("cmpl-") for name in names.values())
    for track in names:
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["tid"] == track]
        kinds = [event["name"].split()[0] for event in slices]
        assert "chunk" in kinds
        assert kinds.count("token") == 5, "the first token comes out of the last chunk"
        tokens = [event for event in slices if event["name"].startswith("token")]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(tokens))
    budgets = [event for event in events if event["ph"] == "C" and event["name"] == "token budget"]
    assert any(event["args"]["budget"] > 0 for event in budgets)


def test_a_trace_of_a_log_file(tmp_path: Path) -> None:
    entry = {
        "seq": 1, "group": 0, "iteration": 1, "start_ms": 1000.0, "actual_ms": 50.0, "predicted_ms": 40.0, "budget": 8,
        "bound": "prompts", "allowed_ms": None, "tightest": None, "prefill_tokens": 8, "decodes": 0,
        "chunks": [{"request": "r", "offset": 0, "count": 8, "prompt_tokens": 8, "waited_ms": 20.0, "ttft_ms": 500.0,
                    "tpot_ms": 100.0, "tbt_ms": 150.0}],
        "tokens": ["r"], "finished": [], "preempted": [],
    }  # fmt: skip
    later = {**entry, "seq": 2, "start_ms": 1400.0, "chunks": [], "prefill_tokens": 0, "decodes": 1, "finished": ["r"]}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(entry) + "\n" + json.dumps(later) + '\n{"half')
    output = tmp_path / "trace.json"
    assert run(["trace", str(log), "--output", str(output)]) == 0
    events = check_trace(json.loads(output.read_text()))
    slices = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert slices == {
        "queue": (980_000, 20_000),
        "chunk 0+8": (1_000_000, 50_000),
        "token 1": (1_400_000, 50_000),
        "stall of 400 ms": (1_050_000, 400_000),
    }


def test_a_trace_of_kv_that_moves() -> None:
    """Parts of a transfer go while the next chunk is computed: on a track of their own, with an arrow to what comes."""
    moved = {"request": "r", "source": 0, "target": 1, "bytes": 9, "send_ms": 60.0, "wait_ms": 10.0,
             "sends": [[1050.002, 1090.0], [1100.0, 1110.0]]}  # fmt: skip
    chunk = {"request": "r", "offset": 0, "count": 8, "prompt_tokens": 16, "waited_ms": 20.0, "ttft_ms": 500.0,
             "tpot_ms": 100.0, "tbt_ms": None}  # fmt: skip
    entry = {
        "seq": 1, "group": 0, "iteration": 1, "start_ms": 1000.0, "actual_ms": 50.001, "predicted_ms": 40.0,
        "budget": 8, "bound": "prompts", "allowed_ms": None, "tightest": None, "prefill_tokens": 8, "decodes": 0,
        "chunks": [chunk], "tokens": [], "finished": [], "preempted": [],
    }  # fmt: skip
    second = {**entry, "start_ms": 1050.0, "actual_ms": 50.0, "chunks": [{**chunk, "offset": 8}], "tokens": ["r"]}
    third = {**entry, "group": 1, "start_ms": 1120.0, "chunks": [], "tokens": ["r"], "finished": ["r"]}
    events = check_trace(chrome_trace([entry, second, {**third, "transfers": [moved]}]))
    process = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "KV transfers")
    parts = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == process]
    assert parts == [("KV to group 1", 1_050_002, 39_998), ("part 2", 1_100_000, 10_000)]
    arrow = [(e["ph"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrow == [("s", process, 1_100_000), ("f", 1, 1_120_000)]
    colocated = check_trace(chrome_trace([entry, second]))
    assert not any(e["name"] == "process_name" and e["args"]["name"] == "KV transfers" for e in colocated)


@pytest.mark.parametrize(
    ("content", "says"),
    [("nonsense\n{}\n", "line 1: not JSON"), ("{}\n{}\n", "no iteration log"), ("", "no iterations")],
)
def test_what_is_no_log_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    assert run(["trace", str(log), "--output", str(tmp_path / "t.json")]) in (1, 2)
    assert says in capsys.readouterr().err
    assert run(["trace", str(tmp_path / "missing"), "--output", "t.json"]) == 2
    assert run(["trace", "http://127.0.0.1:9", "--output", "t.json"]) == 1
