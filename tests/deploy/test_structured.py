"""`response_format` over the real model: the answer is JSON of the schema, whatever else goes on; or it is a 400."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from jsonschema import validate

from cluster.local import LocalEngine
from tests.deploy.conftest import MODEL
from tests.deploy.refusals import CHAT, COMPLETIONS, refused
from tests.deploy.test_completions import ask, ask_streamed
from tests.deploy.wire import JsonObject, error_of, finishes, text_of

PERSON: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "minItems": 1, "maxItems": 2},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 8}},
            "required": ["legs"],
            "additionalProperties": False,
        }
    },
}
SHORT: JsonObject = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}, "old": {"type": "boolean"}},
    "required": ["age", "old"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "Describe a person and their pet."}]


def formatted(schema: JsonObject, strict: bool | None = True) -> JsonObject:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def person(text: str) -> Any:
    found = json.loads(text)
    validate(found, PERSON)
    assert list(found) == ["name", "age", "tags", "pet"], "in the schema's order"
    return found


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"seed": 5, "top_p": 0.9}])
async def test_an_answer_is_json_of_the_schema(client: httpx.AsyncClient, sampling: JsonObject) -> None:
    asked = {"messages": HELLO, "response_format": formatted(PERSON, strict=None), "max_tokens": 150, **sampling}
    (choice,) = (await ask(client, CHAT, **asked))["choices"]
    assert choice["finish_reason"] == "stop"
    person(choice["message"]["content"])
    streamed = await ask_streamed(client, CHAT, **asked)
    assert text_of(streamed) == choice["message"]["content"]
    assert finishes(streamed) == ["stop"]


async def test_any_object_and_one_that_is_cut(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "JSON: ", "response_format": {"type": "json_object"}, "temperature": 0.8, "seed": 1}
    cut = (await ask(client, COMPLETIONS, **asked, max_tokens=3))["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["text"].startswith("{")
    ended = 0
    for choice in (await ask(client, COMPLETIONS, **asked, n=4, max_tokens=80))["choices"]:
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            ended += 1
            assert isinstance(json.loads(choice["text"]), dict)
    assert ended, "no choice came to its end"


async def test_the_same_alone_in_a_batch_and_beside_free_ones(client: httpx.AsyncClient) -> None:
    async def one(seed: int, constrained: bool) -> JsonObject:
        extra = {"response_format": formatted(SHORT), "max_tokens": 60} if constrained else {"max_tokens": 30}
        asked = {"prompt": f"Person {seed}: ", "seed": seed, "temperature": 1.0, "logprobs": 2}
        choice: JsonObject = (await ask(client, COMPLETIONS, **asked, **extra))["choices"][0]
        return choice

    alone = [await one(seed, seed % 2 == 0) for seed in range(4)]
    together = await asyncio.gather(*(one(seed, seed % 2 == 0) for seed in range(4)))
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    for choice in alone[::2]:
        validate(json.loads(choice["text"]), SHORT)
        assert min(choice["logprobs"]["token_logprobs"]) < -1, "those of the model, which wanted something else"


async def test_choices_differ_and_each_is_right(client: httpx.AsyncClient) -> None:
    asked = {"messages": HELLO, "response_format": formatted(SHORT), "n": 4, "seed": 11, "temperature": 1.2}
    choices = (await ask(client, CHAT, **asked, max_tokens=60))["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) > 1
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    for text in texts:
        validate(json.loads(text), SHORT)


async def test_the_official_client(server_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as official:
        answer = await official.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "A colour?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "colour",
                    "schema": {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"],
                               "additionalProperties": False},
                    "strict": True,
                },
            },
            temperature=0,
        )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "")["c"] in ("red", "blue")


async def test_patterns_are_those_of_json_schema(client: httpx.AsyncClient) -> None:
    """And not Python's, which knows neither of these."""
    schema = {"type": "string", "pattern": "^(?<first>\\p{Lu})\\p{Ll}{2}$"}
    asked = {"messages": HELLO, "response_format": formatted(schema), "max_tokens": 20, "temperature": 0}
    (choice,) = (await ask(client, CHAT, **asked))["choices"]
    text = json.loads(choice["message"]["content"])
    assert len(text) == 3
    assert text.isalpha()
    assert text == text.capitalize()


async def test_what_demands_nothing_or_is_written_unusually(client: httpx.AsyncClient) -> None:
    schema = {"type": "array", "uniqueItems": False, "minItems": 1.0, "maxItems": 2.0, "items": {"enum": ["a", 5e-3]}}
    asked = {"messages": HELLO, "response_format": formatted(schema), "max_tokens": 30, "temperature": 0}
    (choice,) = (await ask(client, CHAT, **asked))["choices"]
    validate(json.loads(choice["message"]["content"]), schema)


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "nope"}, "nope"),
        ({"type": "object", "properties": []}, "properties"),
        ({"properties": {"a": {"minimum": "b"}}}, "properties.a.minimum"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "https://example.org/a"}, "https://example.org/a"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "not"),
        ({"enum": ["x" * 70_000]}, "limit"),
        ({"properties": {f"p{number}": {"type": "string"} for number in range(2000)}}, "Too many items"),
        ({"type": "string", "pattern": "(" * 3000 + ")" * 3000}, ""),
        (json.loads('{"items":' * 150 + "{}" + "}" * 150), "nested too deeply"),
        ({"$ref": "#"}, "a reference to itself"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"enum": [1, 1234567890123456789]}, "enum"),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum"),
        ({"pattern": "^[[:alpha:]]$"}, "[ in a character class"),
    ],
)
async def test_a_schema_that_cannot_be_kept_is_a_400(client: httpx.AsyncClient, schema: JsonObject, says: str) -> None:
    error = await refused(client, CHAT, response_format=formatted(schema))
    assert (error["code"], error["param"]) == ("invalid_json_schema", SCHEMA)
    assert says in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "json"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": True}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "more": 1}},
            "response_format.json_schema.more",
        ),
        ("json", "response_format"),
    ],
)
async def test_a_format_that_is_none(client: httpx.AsyncClient, wanted: Any, param: str) -> None:
    assert (await refused(client, CHAT, response_format=wanted))["param"] == param


async def test_what_does_not_go_together(client: httpx.AsyncClient) -> None:
    error = await refused(client, CHAT, response_format={"type": "json_object"}, ignore_eos=True)
    assert error["param"] == "ignore_eos"


async def test_numbers_that_json_has_not(client: httpx.AsyncClient) -> None:
    wanted = formatted({"minimum": "HERE"})
    body = json.dumps({"model": MODEL, "messages": HELLO, "response_format": wanted}).replace('"HERE"', "1e999")
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == SCHEMA


async def test_streams_go_on_while_a_large_schema_is_compiled(client: httpx.AsyncClient, engine: LocalEngine) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(300)}}
    free = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True}
    answers = await asyncio.gather(
        ask(client, COMPLETIONS, **free),
        ask(client, COMPLETIONS, prompt="A", max_tokens=2, response_format=formatted(wide)),
    )
    assert answers[0]["usage"]["completion_tokens"] == 30
    assert answers[1]["choices"][0]["text"].startswith("{")
