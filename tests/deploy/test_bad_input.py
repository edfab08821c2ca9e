"""Whatever a client sends is answered in OpenAI's error shape, and the next request works."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.config import EngineConfig
from cluster.local import LocalEngine
from deploy.api import create_api
from tests.deploy.conftest import MAX_MODEL_LEN, MODEL, in_process
from tests.deploy.refusals import CHAT, COMPLETIONS, HELLO, refused, the_next_request_works  # noqa: F401
from tests.deploy.wire import JsonObject, error_of
from workers.tokenizer import Tokenizer

# Case 1: the model's maximum.


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 4 * MAX_MODEL_LEN])
@pytest.mark.parametrize("as_text", [False, True])
async def test_prompt_of_the_maximum_or_more(client: httpx.AsyncClient, length: int, as_text: bool) -> None:
    prompt: Any = " a" * length if as_text else [1000] * length
    error = await refused(client, COMPLETIONS, prompt=prompt, max_tokens=None)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert str(length) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


async def test_chat_longer_than_the_maximum(client: httpx.AsyncClient) -> None:
    error = await refused(client, CHAT, messages=[{"role": "user", "content": "a " * 2000}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("max_tokens", [None, 1])
async def test_prompt_one_shorter_gives_one_token(client: httpx.AsyncClient, max_tokens: int | None) -> None:
    body = {"model": MODEL, "prompt": [1000] * (MAX_MODEL_LEN - 1), "max_tokens": max_tokens, "ignore_eos": True}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("max_tokens", [MAX_MODEL_LEN, 10**9, 10**400])
async def test_max_tokens_beyond_the_rest(client: httpx.AsyncClient, path: str, max_tokens: int) -> None:
    error = await refused(client, path, max_tokens=max_tokens)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert str(MAX_MODEL_LEN) in error["message"]


async def test_max_tokens_omitted_is_clamped_to_the_rest(client: httpx.AsyncClient) -> None:
    prompt = [1000] * (MAX_MODEL_LEN - 4)
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 4


# Case 2: the KV pool.


async def test_larger_than_the_pool_is_refused_and_outgrowing_it_ends_alone(tokenizer: Tokenizer) -> None:
    config = EngineConfig(model=MODEL, policy="chunked", max_model_len=MAX_MODEL_LEN, num_blocks=4, block_size=16)
    engine = await LocalEngine.start(config)
    try:
        async with in_process(create_api(engine, tokenizer)) as client:
            error = await refused(client, COMPLETIONS, prompt=[1000] * 65)
            assert (error["code"], error["param"]) == ("kv_capacity_exceeded", "prompt")
            assert "needs 5 KV blocks" in error["message"]
            assert "has 4" in error["message"]
            body = {"model": MODEL, "prompt": [1000] * 60, "max_tokens": 100, "ignore_eos": True}
            choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "kv_capacity")
            after = await client.post(COMPLETIONS, json={**body, "max_tokens": 2})
            assert after.json()["usage"]["completion_tokens"] == 2
    finally:
        await engine.close()


# Case 3: nothing to continue.


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["Hello", ""], [[1], []], None, {}, 5, True, "\x1d"])
async def test_empty_prompt(client: httpx.AsyncClient, prompt: Any) -> None:
    assert (await refused(client, COMPLETIONS, prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("messages", [[], None, "Hello", {}, [None], [[]], [{}], [{"role": "user"}]])
async def test_empty_messages(client: httpx.AsyncClient, messages: Any) -> None:
    assert (await refused(client, CHAT, messages=messages))["param"].startswith("messages")


# Case 5: logit_bias.


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"49152": 1}, "49152"),
        ({"-1": 1}, "-1"),
        ({"hello": 1}, "hello"),
        ({"1.5": 1}, "1.5"),
        ({"٣": 1}, "٣"),
        ({"9" * 5000: 1}, "999"),
        ({"7": 101}, "7"),
        ({"7": float("nan")}, "7"),
        ({"7": "1"}, "7"),
        ({str(key): 1 for key in range(5000)}, "300"),
    ],
)
async def test_logit_bias_names_the_key(client: httpx.AsyncClient, bias: dict[str, Any], named: str) -> None:
    error = await refused(client, COMPLETIONS, logit_bias=bias)
    assert error["param"].startswith("logit_bias")
    assert named in error["message"]


# Case 6: token ids.


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**63, 10**30, 1.5, "1", None, True, [1]])
async def test_token_ids_outside_the_vocabulary(client: httpx.AsyncClient, token: Any) -> None:
    for prompt in ([5, token], [[5], [6, token]]):
        assert (await refused(client, COMPLETIONS, prompt=prompt))["param"] == "prompt"


# Case 7: numbers that are none, or out of range.

RANGES: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, -1e9, 1e300],
    "top_p": [-0.1, 0, 1.1],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 101],
    "top_k": [-2, 1.5, 2**40],
    "n": [0, -1, 129, 1.5],
    "seed": [2**64, -(2**63) - 1, 1.5],
    "max_tokens": [0, -1, 1.5],
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", RANGES)
async def test_numbers_out_of_range(client: httpx.AsyncClient, path: str, name: str) -> None:
    no_numbers = [float("nan"), float("inf"), -float("inf"), "NaN", "Infinity", "1", True, [], {}, 10**400]
    for value in [*RANGES[name], *no_numbers]:
        assert (await refused(client, path, **{name: value}))["param"] == name, value


@pytest.mark.parametrize("literal", ["NaN", "-Infinity", "1e999"])
async def test_numbers_that_are_no_json(client: httpx.AsyncClient, literal: str) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "Hello", "temperature": {literal}}}'
    response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "temperature"
    unused = await refused(client, COMPLETIONS, metadata={"x": float("nan")})
    assert unused["code"] == "invalid_json"


# Case 8: models.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("model", ["gpt-4o", "", "smollm2 ", "\N{PILE OF POO}" * 1000])
async def test_unknown_model(client: httpx.AsyncClient, path: str, model: str) -> None:
    error = await refused(client, path, 404, model=model)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(error["message"]) < 300


async def test_unknown_model_is_not_described(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v1/models/owner/none"), 404)["code"] == "model_not_found"
    assert (await refused(client, COMPLETIONS, model=None))["code"] == "missing_required_parameter"


# What is not supported is refused by name, never ignored.


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "structured_outputs", {"json": {}}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "audio", {"voice": "alloy", "format": "mp3"}),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "chat_template", "{{ 1 }}"),
        (COMPLETIONS, "suffix", "the end"),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "guided_json", {}),
        (COMPLETIONS, "min_tokens", 1),
        (COMPLETIONS, "use_beam_search", True),
    ],
)
async def test_unsupported_fields(client: httpx.AsyncClient, path: str, field: str, value: Any) -> None:
    error = await refused(client, path, **{field: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


async def test_unknown_fields(client: httpx.AsyncClient) -> None:
    error = await refused(client, CHAT, temprature=0.5)
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
    error = await refused(client, CHAT, stream=True, stream_options={"include_usages": True})
    assert (error["code"], error["param"]) == ("unknown_parameter", "stream_options.include_usages")


async def test_fields_that_ask_for_nothing(client: httpx.AsyncClient) -> None:
    nothing = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [], "seed": None,
        "tool_choice": "none", "response_format": {"type": "text"}, "audio": None, "logit_bias": None, "stop": None,
    }  # fmt: skip
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1, **nothing}
    assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "4", "tool_call_id": "x"}, "messages[0].role"),
        ({"role": "king", "content": "Hello"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}, "messages[0].content[0].b"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "colour": "red"}, "messages[0].colour"),
    ],
)
async def test_messages_name_what_is_wrong(client: httpx.AsyncClient, message: JsonObject, param: str) -> None:
    assert (await refused(client, CHAT, messages=[message]))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"stop": ["a", 5]}, "stop[1]"),
        (COMPLETIONS, {"stop": "a" * 2000}, "stop"),
        (COMPLETIONS, {"stop_token_ids": [49152]}, "stop_token_ids"),
        (COMPLETIONS, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (COMPLETIONS, {"stop_token_ids": list(range(200))}, "stop_token_ids"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 128}, "n"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "messages"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"stream": "true"}, "stream"),
    ],
)
async def test_bounds_of_other_fields(client: httpx.AsyncClient, path: str, fields: JsonObject, param: str) -> None:
    assert (await refused(client, path, **fields))["param"] == param
