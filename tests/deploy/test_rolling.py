"""What an operator changes while clients are served: API replicas that come and go, and another application."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from deploy.ports import check_port
from tests.deploy.wire import error_of, events, finishes, text_of

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(400)]

APPLICATION = "rolling"
BODY = {"model": "tiny", "prompt": [7] * 20, "temperature": 0, "ignore_eos": True, "stream": True}


class Operator:
    """Deploys as `serve deploy` does. What is changed of a deployment replaces no other; an argument replaces all."""

    def __init__(self, folder: Path) -> None:
        self._arguments: dict[str, Any] = {
            "model": str(folder), "served_model_name": "tiny", "policy": "chunked", "num_blocks": 600,
            "profile_seconds": 0, "threads": 1, "drain_seconds": 60,
        }  # fmt: skip

    async def deploy(self, replicas: int, **changes: Any) -> None:
        self._arguments |= changes
        application = {
            "name": APPLICATION, "route_prefix": "/", "import_path": "deploy.app:build_app",
            "args": self._arguments, "deployments": [{"name": "Api", "num_replicas": replicas}],
        }  # fmt: skip
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        await asyncio.to_thread(_get_global_client().deploy_apps, schema, _blocking=False)

    async def until_running(self, replicas: int) -> None:
        while True:
            status = serve.status().applications.get(APPLICATION)
            if status is not None and status.status == "RUNNING":
                states = status.deployments["Api"].replica_states
                if states == {"RUNNING": replicas}:
                    return
            await asyncio.sleep(0.2)


@pytest.fixture
def url(ray_cluster: None) -> Iterator[str]:
    port = check_port("127.0.0.1", 0)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def ask(url: str, max_tokens: int, begun: asyncio.Event | None = None) -> httpx.Response:
    """On a connection of its own, as of another client. The answer has been read."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": max_tokens}) as response,
    ):
        if begun is not None:
            begun.set()
        await response.aread()
        return response


async def engine_name() -> str:
    """Of the one that the application has now; empty while that is being made."""
    try:
        name, _ = await asyncio.wait_for(_scheduler(), 5)
    except (RayServeException, RayError, TimeoutError):
        return ""
    return str(name)


async def _scheduler() -> tuple[str, str]:
    found: tuple[str, str] = await serve.get_deployment_handle("Engine", APPLICATION).scheduler.remote()
    return found


async def test_api_replicas_come_and_go_and_no_request_is_lost(url: str, tiny_model_dir: Path) -> None:
    operator = Operator(tiny_model_dir)
    await operator.deploy(2)
    await operator.until_running(2)
    await until_ready(url)
    undisturbed = text_of(events((await ask(url, 200)).text))
    changed = asyncio.Event()

    async def clients() -> list[httpx.Response]:
        answers = []
        while not changed.is_set():
            answers.append(await ask(url, 200))
        return answers

    running = asyncio.gather(*(clients() for _ in range(6)))
    for replicas in (1, 3, 1, 2):  # one that is new at the end is another one than any at the beginning
        await operator.deploy(replicas)
        await operator.until_running(replicas)
    changed.set()
    answers = [answer for some in await running for answer in some]
    assert len(answers) > 20
    assert {answer.status_code for answer in answers} == {200}
    assert {text_of(events(answer.text)) for answer in answers} == {undisturbed}


async def test_another_application_lets_running_streams_finish_and_says_so_to_others(
    url: str, tiny_model_dir: Path
) -> None:
    operator = Operator(tiny_model_dir)
    await operator.deploy(1)
    await operator.until_running(1)
    await until_ready(url)
    undisturbed = text_of(events((await ask(url, 500)).text))
    begun = [asyncio.Event() for _ in range(6)]
    streams = [asyncio.create_task(ask(url, 500, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    before = await engine_name()
    await operator.deploy(1, max_running=32)
    while (await engine_name()) in (before, "") or not all(stream.done() for stream in streams):
        answer = await ask(url, 1)
        if answer.status_code != 200:
            error_of(answer, 503)
            assert int(answer.headers["Retry-After"]) >= 1
        await asyncio.sleep(0.1)
    for stream in streams:
        assert finishes(events((await stream).text)) == ["length"]
        assert text_of(events((await stream).text)) == undisturbed
    await operator.until_running(1)
    assert text_of(events((await ask(url, 500)).text)) == undisturbed
