"""Completions and chats over the real model, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from cluster.local import LocalEngine
from tests.deploy.conftest import CHUNK_SIZE, MAX_MODEL_LEN, MODEL
from tests.deploy.wire import JsonObject, events, finishes, text_of
from workers.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FRANCE = "The capital of France is"


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> JsonObject:
    response = await client.post(path, json={"model": MODEL, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: JsonObject = response.json()
    return answer


async def ask_streamed(client: httpx.AsyncClient, path: str, **fields: Any) -> list[JsonObject]:
    response = await client.post(path, json={"model": MODEL, "temperature": 0, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_a_completion(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=8)
    choice = answer["choices"][0]
    assert answer["object"] == "text_completion"
    assert choice["text"].startswith(" Paris")
    assert choice["finish_reason"] == "length"
    prompt_tokens = len(tokenizer.encode(FRANCE))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == prompt_tokens + 8


async def test_a_chat_ends_by_itself(client: httpx.AsyncClient) -> None:
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "2 + 2 = ?"}]
    answer = await ask(client, CHAT, messages=messages)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert "<|im_end|>" not in choice["message"]["content"]
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert (await ask(client, CHAT, messages=in_parts))["choices"][0]["message"] == choice["message"]


async def test_text_and_its_token_ids_are_the_same_prompt(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(FRANCE)
    by_text = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=4, return_token_ids=True)
    by_ids = await ask(client, COMPLETIONS, prompt=ids, max_tokens=4, return_token_ids=True)
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["choices"][0]["prompt_token_ids"] == ids
    assert tokenizer.decode(by_text["choices"][0]["token_ids"]) == by_text["choices"][0]["text"]


async def test_several_prompts_and_choices_are_in_order(client: httpx.AsyncClient) -> None:
    prompts = [FRANCE, "One two three", "The opposite of hot is"]
    alone = [(await ask(client, COMPLETIONS, prompt=prompt, max_tokens=5))["choices"][0]["text"] for prompt in prompts]
    together = await ask(client, COMPLETIONS, prompt=prompts, max_tokens=5, n=2)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert [choice["text"] for choice in together["choices"]] == [text for text in alone for _ in range(2)]
    assert together["usage"]["completion_tokens"] == 30
    streamed = await ask_streamed(client, COMPLETIONS, prompt=prompts, max_tokens=5, n=2)
    assert [text_of(streamed, index) for index in range(6)] == [choice["text"] for choice in together["choices"]]
    assert [finishes(streamed, index) for index in range(6)] == [["length"]] * 6


async def test_a_seed_fixes_every_choice_and_choices_differ(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "n": 3, "seed": -5}
    first, second = [await ask(client, COMPLETIONS, **fields) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert len({choice["text"] for choice in first["choices"]}) == 3
    unseeded = [await ask(client, COMPLETIONS, **{**fields, "seed": None}) for _ in range(2)]
    assert unseeded[0]["choices"] != unseeded[1]["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_streamed_is_what_is_not_streamed(client: httpx.AsyncClient, path: str) -> None:
    """Case 13: this answer is all emoji, each of three or four tokens."""
    prompt: JsonObject = {"messages": [{"role": "user", "content": "Say hi with an emoji."}]}
    if path == COMPLETIONS:
        prompt = {"prompt": "My favourite emoji: 😀 😉 🎉 😀 😉 🎉 😀 😉 🎉 😀"}
    for max_tokens in (11, 12, 13):
        whole = (await ask(client, path, **prompt, max_tokens=max_tokens))["choices"][0]
        streamed = await ask_streamed(client, path, **prompt, max_tokens=max_tokens)
        text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
        assert any(ord(character) > 0xFFFF for character in text)
        assert text_of(streamed).encode() == text.encode()
        assert finishes(streamed) == [whole["finish_reason"]]


async def test_stop_strings_across_tokens(client: httpx.AsyncClient, engine: LocalEngine) -> None:
    """Case 12."""
    text = (await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=24))["choices"][0]["text"]
    stop = text[8:13]
    expected = text[: text.index(stop)]
    whole = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=24, stop=["never", stop])
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    streamed = await ask_streamed(client, COMPLETIONS, prompt=FRANCE, max_tokens=24, stop=stop)
    assert text_of(streamed) == expected
    assert finishes(streamed) == ["stop"]
    assert whole["usage"]["completion_tokens"] < 24
    included = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert included["choices"][0]["text"] == expected + stop
    assert (await engine.stats())["running"] == 0


async def test_stop_tokens_are_not_part_of_the_text(client: httpx.AsyncClient) -> None:
    whole = (await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=6, return_token_ids=True))["choices"][0]
    stop_token = whole["token_ids"][2]
    stopped = (await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=6, stop_token_ids=[stop_token]))["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop_token)
    assert len(stopped["text"]) < len(whole["text"])


async def test_logprobs_of_completions(client: httpx.AsyncClient) -> None:
    fields = {"prompt": FRANCE, "max_tokens": 6, "logprobs": 3}
    choice = (await ask(client, COMPLETIONS, **fields))["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert len(top) == 3
        assert max(top, key=lambda each: top[each]) == token, "greedy takes the likeliest"
    streamed = await ask_streamed(client, COMPLETIONS, **fields)
    parts = [event["choices"][0]["logprobs"] for event in streamed if event["choices"]]
    assert [token for part in parts for token in part["tokens"]] == logprobs["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]


async def test_logprobs_of_chats_have_the_bytes(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Say hi with an emoji."}]
    fields = {"messages": messages, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    choice = (await ask(client, CHAT, **fields))["choices"][0]
    records = choice["logprobs"]["content"]
    assert len(records) == 12
    assert bytes(byte for record in records for byte in record["bytes"]).decode() == choice["message"]["content"]
    assert all(len(record["top_logprobs"]) == 2 for record in records)
    streamed = await ask_streamed(client, CHAT, **fields)
    parts = [event["choices"][0]["logprobs"] for event in streamed if event["choices"]]
    assert [record for part in parts if part for record in part["content"]] == records
    plain = (await ask(client, CHAT, messages=messages, max_tokens=2, logprobs=True))["choices"][0]
    assert [record["top_logprobs"] for record in plain["logprobs"]["content"]] == [[], []]


async def test_echo_comes_before_the_completion(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = (await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=4))["choices"][0]["text"]
    for prompt in (FRANCE, tokenizer.encode(FRANCE)):
        answer = await ask(client, COMPLETIONS, prompt=prompt, max_tokens=4, echo=True)
        assert answer["choices"][0]["text"] == FRANCE + text
        assert answer["usage"]["completion_tokens"] == 4
    streamed = await ask_streamed(client, COMPLETIONS, prompt=[FRANCE, "One"], n=2, max_tokens=4, echo=True)
    assert text_of(streamed, 0) == text_of(streamed, 1) == FRANCE + text
    assert text_of(streamed, 2).startswith("One")
    stopped = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=4, echo=True, stop="France")
    assert stopped["choices"][0]["text"] == FRANCE + text, "a stop string is looked for in the completion alone"


async def test_sampling_parameters_reach_the_engine(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    cat = tokenizer.encode(" cat")[0]
    forced = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=3, logit_bias={str(cat): 100})
    assert forced["choices"][0]["text"] == " cat cat cat"
    greedy = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=6)
    only_one = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=6, temperature=1.5, top_k=1)
    assert only_one["choices"][0]["text"] == greedy["choices"][0]["text"]
    penalties = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.8}
    loop = {"prompt": "la la la la la la la la", "max_tokens": 10}
    assert (await ask(client, COMPLETIONS, **loop, **penalties))["choices"] != (await ask(client, COMPLETIONS, **loop))[
        "choices"
    ]


async def test_ignore_eos_goes_on_and_special_tokens_stay_hidden(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Say only: yes"}]
    fields = {"messages": messages, "max_tokens": 60}
    ended = (await ask(client, CHAT, **fields))["choices"][0]
    assert ended["finish_reason"] == "stop"
    went_on = await ask(client, CHAT, **fields, ignore_eos=True)
    assert went_on["usage"]["completion_tokens"] == 60
    assert "<|im_end|>" not in went_on["choices"][0]["message"]["content"]
    shown = await ask(client, CHAT, **fields, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" in shown["choices"][0]["message"]["content"]


async def test_a_chat_without_max_tokens_may_use_the_rest(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "word " * (MAX_MODEL_LEN - 60)}]
    answer = await ask(client, CHAT, messages=messages, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_counts_first(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]
    answer = await ask(client, CHAT, messages=messages, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_last_message_can_be_continued(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "One, two,"}]
    answer = await ask(client, CHAT, messages=messages, max_tokens=3, continue_final_message=True)
    assert "three" in answer["choices"][0]["message"]["content"].lower()


async def test_the_same_request_id_twice_at_once(client: httpx.AsyncClient) -> None:
    """Case 9."""
    headers = {"X-Request-Id": "the-same"}
    body = {"model": MODEL, "prompt": FRANCE, "max_tokens": 8, "temperature": 0}
    both = await asyncio.gather(*(client.post(COMPLETIONS, json=body, headers=headers) for _ in range(2)))
    assert [response.status_code for response in both] == [200, 200]
    assert both[0].json()["choices"] == both[1].json()["choices"]
    assert both[0].json()["id"] != both[1].json()["id"]
    assert both[0].headers["x-request-id"] == "the-same"


async def test_models_health_metrics(client: httpx.AsyncClient, engine: LocalEngine) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    before = (await engine.stats())["iterations"]
    assert (await client.get("/health")).status_code == 200
    assert (await engine.stats())["iterations"] > before, "health is a real forward"
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "stallfree_" in metrics.text


async def test_log_probabilities_of_the_prompt(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """Whole and streamed, as text and as token ids, with a completion and without one, in several chunks."""
    text = FRANCE + " Paris, and that of Japan is Tokyo." * 5
    ids, fields = tokenizer.encode(text), {"echo": True, "logprobs": 2}
    assert len(ids) > CHUNK_SIZE
    choice = (await ask(client, COMPLETIONS, prompt=text, max_tokens=3, **fields))["choices"][0]
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {len(ids) + 3}
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])
    assert found["text_offset"] == [len("".join(found["tokens"][:index])) for index in range(len(ids) + 3)]
    own = (await ask(client, COMPLETIONS, prompt=text, max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
    assert found["tokens"][-3:] == own["tokens"]
    assert found["token_logprobs"][-3:] == pytest.approx(own["token_logprobs"], abs=1e-4)

    alone = await ask(client, COMPLETIONS, prompt=[ids, ids], n=2, max_tokens=0, **fields)
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(alone["choices"]) == 4
    for each in alone["choices"]:
        assert (each["text"], each["finish_reason"]) == (text, "length")
        assert each["logprobs"]["tokens"] == found["tokens"][:-3]
        assert each["logprobs"]["token_logprobs"][1:] == pytest.approx(found["token_logprobs"][1:-3], abs=1e-4)

    streamed = await ask_streamed(client, COMPLETIONS, prompt=text, max_tokens=3, **fields)
    parts = [event["choices"][0] for event in streamed if event["choices"]]
    assert parts[0]["text"].startswith(text)
    assert "".join(part["text"] for part in parts) == choice["text"]
    joined = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert joined[1:] == pytest.approx(found["token_logprobs"][1:], abs=1e-4)


async def test_a_prompt_alone(client: httpx.AsyncClient) -> None:
    answer = await ask(client, COMPLETIONS, prompt=FRANCE, max_tokens=0, echo=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (FRANCE, "length", None)
    assert answer["usage"]["completion_tokens"] == 0
    streamed = await ask_streamed(client, COMPLETIONS, prompt=FRANCE, max_tokens=0, echo=True)
    assert (text_of(streamed), finishes(streamed)) == (FRANCE, ["length"])
    refused = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": FRANCE, "max_tokens": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"
