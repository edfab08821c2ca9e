"""Case 18: far more requests than the queue's bounds, by requests and by tokens, over a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import ApiSettings, create_api
from deploy.api.keys import Key, new_secret
from tests.deploy.conftest import served, until
from tests.deploy.wire import error_of
from workers.tokenizer import Tokenizer

BODY = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 60, "ignore_eos": True}


@asynccontextmanager
async def small(
    folder: Path, settings: ApiSettings | None = None, **bounds: int
) -> AsyncIterator[tuple[LocalEngine, httpx.AsyncClient]]:
    """Two sequences run at once; how many may wait is said."""
    config = EngineConfig(
        model=str(folder), served_model_name="tiny", policy="chunked", profile_seconds=0, num_blocks=64, max_running=2,
        threads=1, **bounds,
    )  # fmt: skip
    engine = await LocalEngine.start(config)
    async with (
        served(create_api(engine, Tokenizer.load(folder), settings)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield engine, client
        await until(lambda: engine.scheduler.idle)
        assert engine.scheduler.pool.referenced == 0
    await engine.close()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [({"max_queued_requests": 4}, "4 requests are waiting"), ({"max_queued_tokens": 160}, "160 tokens are waiting")],
)
async def test_what_exceeds_a_bound_is_refused_and_health_answers(
    tiny_model_dir: Path, bounds: dict[str, int], words: str
) -> None:
    async with small(tiny_model_dir, **bounds) as (engine, client):
        flood = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(40)]
        await until(lambda: len(engine.scheduler.waiting) >= 2)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        answers = await asyncio.gather(*flood)
        served, refused = ([a for a in answers if a.status_code == status] for status in (200, 429))
        assert len(served) + len(refused) == 40
        assert len(served) >= 4
        assert refused
        for answer in refused:
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert words in error["message"]
            assert int(answer.headers["Retry-After"]) >= 1
        assert {a.json()["usage"]["completion_tokens"] for a in served} == {60}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200, "normal service again"


async def test_n_counts_n(tiny_model_dir: Path) -> None:
    async with small(tiny_model_dir, max_queued_requests=4) as (engine, client):
        running = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(2)]
        await until(lambda: len(engine.scheduler.running) == 2)
        error_of(await client.post("/v1/completions", json={**BODY, "n": 5}), 429)
        assert (await client.post("/v1/completions", json={**BODY, "n": 4})).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_a_tenant_that_floods_gets_the_refusals_itself(tiny_model_dir: Path) -> None:
    """It asks again the moment it is answered, so that the queue is full all the time; another one's requests are let
    in, and do not wait behind those that waited already."""
    flooder, other = new_secret(), new_secret()
    settings = ApiSettings(api_keys=(Key.of("flooder", flooder), Key.of("other", other)))
    async with small(tiny_model_dir, settings, max_queued_requests=8) as (engine, client):
        enough = asyncio.Event()
        statuses: list[int] = []
        body = {**BODY, "max_tokens": 20}

        async def flood() -> None:
            while not enough.is_set():
                answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {flooder}"})
                statuses.append(answer.status_code)
                await asyncio.sleep(0.01 if answer.status_code == 429 else 0)

        flooding = [asyncio.create_task(flood()) for _ in range(30)]
        await until(lambda: len(engine.scheduler.waiting) >= 8)
        for _ in range(3):
            before = statuses.count(200)
            answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {other}"})
            assert answer.status_code == 200
            assert statuses.count(200) - before < 8, "it waited behind the whole queue"
        enough.set()
        await asyncio.gather(*flooding)
        assert set(statuses) == {200, 429}
