"""Promises of a request: by numbers or class, in the body or by header; nonsense is a 400 that names it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from scheduler.intake import Intake
from scheduler.request import Request, Sequence
from scheduler.slo import Promise, PromiseBook
from tests.deploy.conftest import MODEL, served
from tests.deploy.wire import error_of
from workers.tokenizer import Tokenizer

BODY: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2}


@pytest.fixture
def promised(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[Promise]:
    """What the scheduler understood, in the order of the requests."""
    found: list[Promise] = []
    understand = Intake.newcomer
    book = PromiseBook(lambda tokens: Promise(7.0, 0.7), {"batch": 10.0, "gold": Promise(0.5, 0.05, 0.1)})
    monkeypatch.setattr(engine.scheduler.intake, "promises", book)

    def spy(intake: Intake, request: Request, now: float) -> Sequence:
        sequence = understand(intake, request, now)
        found.append(sequence.promise)
        return sequence

    monkeypatch.setattr(Intake, "newcomer", spy)
    return found


@pytest.mark.parametrize(
    ("slo", "header", "promise"),
    [
        (None, None, Promise(7.0, 0.7)),
        ({"ttft_ms": 2000, "tpot_ms": 100, "tbt_ms": 300}, None, Promise(2.0, 0.1, 0.3)),
        ({"ttft_ms": 2000.5, "tpot_ms": 100}, None, Promise(2.0005, 0.1)),
        ("gold", None, Promise(0.5, 0.05, 0.1)),
        (None, "batch", Promise(70.0, 7.0)),
        (None, json.dumps({"ttft_ms": 1000, "tpot_ms": 50}), Promise(1.0, 0.05)),
        ("gold", "batch", Promise(0.5, 0.05, 0.1)),
    ],
)
async def test_what_was_asked_for(
    client: httpx.AsyncClient, promised: list[Promise], slo: Any, header: str | None, promise: Promise
) -> None:
    body = BODY if slo is None else {**BODY, "slo": slo}
    headers = {} if header is None else {"X-SLO": header}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert promised == [promise]


@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ("tin", "slo"),
        ("", "slo"),
        ("x" * 1000, "slo"),
        (5, "slo"),
        ([], "slo"),
        ({}, "slo"),
        ({"ttft_ms": 1000}, "slo.tpot_ms"),
        ({"ttft_ms": 0, "tpot_ms": 100}, "slo.ttft_ms"),
        ({"ttft_ms": -1, "tpot_ms": 100}, "slo.ttft_ms"),
        ({"ttft_ms": 1e-323, "tpot_ms": 100}, "slo.ttft_ms"),
        ({"ttft_ms": "2000", "tpot_ms": 100}, "slo.ttft_ms"),
        ({"ttft_ms": 1e30, "tpot_ms": 100}, "slo.ttft_ms"),
        ({"ttft_ms": 1000, "tpot_ms": 100, "tbt_ms": False}, "slo.tbt_ms"),
        ({"ttft_ms": 1000, "tpot_ms": 100, "speed": 1}, "slo.speed"),
    ],
)
async def test_nonsense_is_a_400_and_the_next_request_a_200(
    client: httpx.AsyncClient, promised: list[Promise], slo: Any, param: str
) -> None:
    answer = await client.post("/v1/completions", json={**BODY, "slo": slo})
    assert answer.status_code == 400, answer.text
    assert str(error_of(answer, 400)["param"]).startswith(param.split(".")[0])
    assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("header", ["{", '{"ttft_ms": 1}', "{}", '{"ttft_ms": NaN, "tpot_ms": 1}', "tin"])
async def test_a_header_that_is_nonsense_is_a_400(
    client: httpx.AsyncClient, promised: list[Promise], header: str
) -> None:
    answer = await client.post("/v1/completions", json=BODY, headers={"X-SLO": header})
    assert answer.status_code == 400, answer.text
    assert error_of(answer, 400)["type"] == "invalid_request_error"


@pytest_asyncio.fixture(scope="module")
async def slo_url(tokenizer: Tokenizer) -> AsyncIterator[str]:
    """A server with the slo policy, measured at its start."""
    engine = await LocalEngine.start(EngineConfig(model=MODEL, policy="slo", num_blocks=200, max_model_len=1024))
    async with served(create_api(engine, tokenizer)) as url:
        yield url
    await engine.close()


async def test_the_openai_client_asks_by_extra_body(slo_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{slo_url}/v1", api_key="none") as client:
        for slo in ({"ttft_ms": 60_000, "tpot_ms": 2000}, "interactive", "batch"):
            answer = await client.completions.create(
                model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0, extra_body={"slo": slo}
            )
            assert answer.choices[0].text.startswith(" Paris")
        with pytest.raises(openai.BadRequestError, match="unknown service class 'tin'; known: interactive, batch"):
            await client.completions.create(model=MODEL, prompt="x", extra_body={"slo": "tin"})
