"""The official client, unchanged, against a real server: sync and async, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deploy.conftest import MAX_MODEL_LEN, MODEL

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def sync_client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_sync(sync_client: openai.OpenAI) -> None:
    """On a thread, since the server is in this one."""

    def talk() -> None:
        chat = sync_client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
        text = chat.choices[0].message.content
        assert text
        assert chat.usage
        assert chat.usage.completion_tokens > 0
        chunks = list(
            sync_client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=8, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        usage = chunks[-1].usage
        assert usage
        assert usage.total_tokens == chat.usage.total_tokens
        assert usage.prompt_tokens_details
        assert usage.prompt_tokens_details.cached_tokens, "the same prompt once more"
        whole = sync_client.completions.create(model=MODEL, prompt="One two", max_tokens=4, temperature=0, logprobs=2)
        assert whole.choices[0].logprobs
        streamed = sync_client.completions.create(
            model=MODEL, prompt="One two", max_tokens=4, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
        assert [model.id for model in sync_client.models.list()] == [MODEL]
        assert sync_client.models.retrieve(MODEL).id == MODEL

    await asyncio.to_thread(talk)


async def test_async(server_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].logprobs
        assert chat.choices[0].logprobs.content
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=8, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat.choices[0].message.content
        stop = text[4:7]
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0, stop=stop) as helper:
            assert (await helper.get_final_completion()).choices[0].message.content == text[: text.index(stop)]
        extras = {"top_k": 1, "ignore_eos": True}
        sampled = await client.completions.create(model=MODEL, prompt="One", max_tokens=3, extra_body=extras)
        assert sampled.usage
        assert sampled.usage.completion_tokens == 3


async def test_a_conversation_goes_on_with_what_the_server_answered(server_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        first = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
        answered: Any = first.choices[0].message
        follow_up: list[Any] = [*HELLO, answered, {"role": "user", "content": "Again."}]
        second = await client.chat.completions.create(model=MODEL, messages=follow_up, max_tokens=4)
        assert second.choices[0].message.content


async def test_errors_are_the_clients_own_types(server_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt=[1000] * MAX_MODEL_LEN)
        assert too_long.value.code == "context_length_exceeded"
        assert too_long.value.param == "prompt"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="Hello", temperature=3)
