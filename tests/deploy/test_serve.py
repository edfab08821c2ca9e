"""The application on Ray Serve: a real local Ray, Serve's own proxy, two API replicas over one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeDeploySchema

from cluster.config import EngineConfig
from cluster.local_ray import prepare_environment
from cluster.placement import CPUS_OF_A_RANK
from deploy.app import NAMESPACE, build_app, parse_args
from tests.deploy.test_disconnect import hang_up, send
from tests.deploy.wire import JsonObject, error_of, events, text_of

MODEL = "smollm2"
FRANCE = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
APPLICATION = "served-by-tests"
CHUNK_SIZE = 32


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """This process' Ray where another test has started one, else one of our own."""
    if ray.is_initialized():
        yield
        return
    prepare_environment()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def url(local_ray: None) -> Iterator[str]:
    from deploy.ports import check_port

    port = check_port("127.0.0.1", 0)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    arguments = {
        "model": MODEL,
        "policy": "chunked",
        "chunk_size": str(CHUNK_SIZE),
        "num_blocks": "200",
        "replicas": "2",
    }
    serve.run(build_app({**arguments, "max_model_len": "1024"}), name=APPLICATION, route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


async def stats() -> JsonObject:
    found: JsonObject = await serve.get_deployment_handle("Engine", APPLICATION).stats.remote()
    return found


async def nothing_left() -> JsonObject:
    """The engine's figures once it has nothing to do."""
    return await until(lambda now: now["running"] == now["waiting"] == 0 and now["blocks_free"] == now["blocks_total"])


async def until(true: Callable[[JsonObject], bool]) -> JsonObject:
    while not true(now := await stats()):  # noqa: ASYNC110 - Ray has no event for it
        await asyncio.sleep(0.01)
    return now


async def test_whole_and_streamed(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        whole = (await client.post("/v1/completions", json=FRANCE)).json()
        assert whole["choices"][0]["text"].startswith(" Paris")
        streamed = events((await client.post("/v1/completions", json={**FRANCE, "stream": True})).text)
        assert text_of(streamed) == whole["choices"][0]["text"]
        assert (await client.get("/health")).json() == {"status": "ok", "model": MODEL}
        assert "stallfree_" in (await client.get("/metrics")).text


async def test_many_streams_over_two_replicas(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={**FRANCE, "stream": True}) for _ in range(12))
        )
        assert len({text_of(events(answer.text)) for answer in answers}) == 1


async def test_the_official_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        hello: list[Any] = [{"role": "user", "content": "Say hello."}]
        chat = await client.chat.completions.create(model=MODEL, messages=hello, max_tokens=6, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=hello, max_tokens=6, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat.choices[0].message.content


async def test_the_first_token_comes_before_the_others(url: str) -> None:
    """Nothing on the way gathers a stream's events: the first is here while the engine still works on the last."""
    body = {**FRANCE, "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        received = response.aiter_raw()
        await anext(received)
        assert (await stats())["running"] == 1
    await nothing_left()


async def test_bad_input(url: str) -> None:
    json_type = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for body in (b"{", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}'):
            error_of(await client.post("/v1/completions", content=body, headers=json_type), 400)
        error_of(await client.post("/v1/completions", content=b"a" * (9 * 2**20), headers=json_type), 413)
        error_of(await client.post("/v1/completions", json={**FRANCE, "prompt": [1000] * 1024}), 400)
        error_of(await client.post("/v1/completions", json={**FRANCE, "model": "gpt-4o"}), 404)
        error_of(await client.post("/v1/completions", json={**FRANCE, "temperature": -1, "stream": True}), 400)
        error_of(await client.get("/v1/nothing"), 404)
        error_of(await client.get("/v1/completions"), 405)
        assert (await client.post("/v1/completions", json=FRANCE)).status_code == 200


async def test_the_same_request_id_twice_at_once(url: str) -> None:
    """Case 9. Serve uses this header too."""
    async with httpx.AsyncClient(base_url=url, timeout=120, headers={"X-Request-Id": "the-same"}) as client:
        both = await asyncio.gather(*(client.post("/v1/completions", json=FRANCE) for _ in range(4)))
        assert [response.status_code for response in both] == [200] * 4
        assert len({response.json()["choices"][0]["text"] for response in both}) == 1


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_during_prefill(url: str, how: str, streamed: bool) -> None:
    """Case 17."""
    before = (await nothing_left())["iterations"]
    tokens = 960
    _, writer = await send(url, prompt=[1000] * tokens, stream=streamed, max_tokens=8)
    await until(lambda now: now["iterations"] >= before + 2)
    hang_up(writer, how)
    iterations = (await nothing_left())["iterations"] - before
    assert iterations < tokens / CHUNK_SIZE / 2, "it was prefilled although nobody waited for it"


async def test_a_client_that_leaves_during_decode(url: str) -> None:
    before = (await nothing_left())["iterations"]
    reader, writer = await send(url, prompt="Hello", stream=True, max_tokens=600)
    await reader.readuntil(b"data: ")
    hang_up(writer, "RST")
    assert (await nothing_left())["iterations"] - before < 100


async def test_the_policy_can_be_changed_while_it_runs(url: str) -> None:
    engine = serve.get_deployment_handle("Engine", APPLICATION)
    await engine.configure.remote("whole", CHUNK_SIZE)
    assert (await stats())["policy"] == "whole"
    assert (await engine.info.remote()).policy == "whole"
    await engine.configure.remote("chunked", CHUNK_SIZE)
    assert (await stats())["policy"] == "chunked"


@pytest.mark.slow  # Serve gives a replica three health checks, and then starts engine and API anew
async def test_an_engine_that_dies_is_replaced_and_the_api_finds_the_new_one(url: str) -> None:
    name, namespace = await serve.get_deployment_handle("Engine", APPLICATION).scheduler.remote()
    ray.kill(ray.get_actor(name, namespace=namespace))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while (answer := await client.post("/v1/completions", json=FRANCE)).status_code != 200:
            assert answer.status_code in (500, 503), answer.text
            await asyncio.sleep(0.5)
        assert answer.json()["choices"][0]["text"].startswith(" Paris")


def test_deleting_the_application_frees_its_actors(url: str) -> None:
    """The last test of this file that needs the application."""
    taken = ray.available_resources().get("CPU", 0)
    serve.delete(APPLICATION)
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [actor for actor in named if actor["namespace"] == NAMESPACE] == []
    assert ray.available_resources()["CPU"] == taken + CPUS_OF_A_RANK


# What does not need Ray.


def test_arguments_arrive_as_text() -> None:
    given = parse_args({"model": "smollm2", "tp": "2", "kv_memory": "1GiB", "replicas": "3", "health_timeout_s": "5"})
    assert (given.tp, given.kv_memory, given.replicas, given.health_timeout_s) == (2, 2**30, 3, 5.0)
    assert EngineConfig(**given.part(EngineConfig)).tp == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"modle": "smollm2"}, "unknown argument 'modle'"),
        ({"tp": "two"}, "tp: "),
        ({"tp": "0"}, "tp: "),
        ({"policy": "fastest"}, "policy: "),
        ({"replicas": "-1"}, "replicas: "),
        ({"max_body_bytes": "lots"}, "max_body_bytes: "),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        build_app(arguments)
    assert "\n" not in str(raised.value)


def test_the_deployment_file_is_valid() -> None:
    text = (Path(__file__).parents[2] / "deploy" / "serve.yaml").read_text(encoding="utf-8")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert [application.import_path for application in schema.applications] == ["deploy.app:build_app"]
    parse_args(schema.applications[0].args)
