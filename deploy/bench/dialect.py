"""What a server understands, found out by a few tiny requests before the run: token ids or text, and which fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.workloads.planned import PlannedRequest
from cluster.workloads.prompts import RandomPrompt
from deploy.bench.target import Target
from deploy.errors import CommandError

_OUR_OWN: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "ignore_eos": True,
    "temperature": 0,
}
_OPENAI: dict[str, Any] = {"stream_options": {"include_usage": True}, "temperature": 0}
RUNGS: tuple[dict[str, Any], ...] = (
    _OUR_OWN,
    {**_OPENAI, "ignore_eos": True},
    _OPENAI,
    {"temperature": 0},
    {},
)
"""From the fields that make timing exact down to none; the first that a server does not refuse is taken."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`token_ids`: prompts go as ids. `fields` are those of RUNGS that the server takes."""

    model: str
    endpoint: str
    token_ids: bool
    fields: Mapping[str, Any]
    limit_name: str = "max_tokens"

    def body(self, request: PlannedRequest, target: Target) -> dict[str, Any]:
        """Raises CommandError where the prompt is of ids and the server takes none."""
        asked = {"model": self.model, self.limit_name: request.output_tokens, "stream": True}
        return {**asked, **self.fields, **target.extra, **request.extra, **self._prompt(request, target)}

    def encoded(self, request: PlannedRequest, target: Target) -> bytes:
        return json.dumps(self.body(request, target), separators=(",", ":")).encode()

    def _prompt(self, request: PlannedRequest, target: Target) -> dict[str, Any]:
        prompt = request.prompt
        if isinstance(prompt, RandomPrompt):
            prompt = prompt.token_ids(target.vocabulary) if self.token_ids else prompt.text()
        if not isinstance(prompt, str) and not self.token_ids:
            raise CommandError("this server takes no token ids as prompts; plan text or random prompts for it")
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}


async def detect(client: httpx.AsyncClient, target: Target) -> Dialect:
    """Raises CommandError where the server cannot be reached or refuses every way of asking."""
    try:
        model = target.model or await _first_model(client)
        return await _first_accepted(client, target, model)
    except httpx.TimeoutException:
        raise CommandError(f"{target.url} does not answer") from None
    except (httpx.TransportError, httpx.InvalidURL, httpx.TooManyRedirects) as error:
        raise CommandError(f"{target.url} cannot be reached: {str(error) or type(error).__name__}") from None


async def _first_model(client: httpx.AsyncClient) -> str:
    answer = await client.get("/v1/models")
    try:
        if answer.status_code == 200:
            return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        pass
    raise CommandError(f"the server names no model ({answer.status_code} from /v1/models); give one by --model")


async def _first_accepted(client: httpx.AsyncClient, target: Target, model: str) -> Dialect:
    """A 400 or 422 is for the body, and another body is tried; any other refusal is for good."""
    complaint = ""
    for dialect in _ladder(target, model):
        body = dialect.encoded(_tiny(target, dialect.token_ids), target)
        async with client.stream("POST", target.path, content=body) as answer:
            said = await answer.aread()
        if answer.status_code == 200:
            return dialect
        complaint = error_of(answer.status_code, said)[1]
        if answer.status_code not in (400, 422):
            break
    raise CommandError(f"the server refuses a small request: {complaint}")


def _ladder(target: Target, model: str) -> list[Dialect]:
    if target.endpoint == "completions":
        return [Dialect(model, "completions", ids, fields) for fields in RUNGS for ids in (True, False)]
    usual = [Dialect(model, "chat", False, fields) for fields in RUNGS]
    # OpenAI's newer models take no `max_tokens` in chats, and no temperature.
    return [
        *usual,
        Dialect(model, "chat", False, {"stream_options": _OPENAI["stream_options"]}, "max_completion_tokens"),
    ]


def _tiny(target: Target, token_ids: bool) -> PlannedRequest:
    """With both ends of the vocabulary, so that a model with a smaller one says so now."""
    prompt = [target.vocabulary[0], target.vocabulary[-1]] * 2 if token_ids else "Say a word"
    return PlannedRequest(prompt, 2)


def error_of(status: int, body: bytes) -> tuple[str, str]:
    """Kind and words of a refusal: the status, with the server's code where it gave one. 429 is 429, whoever's."""
    code, message = None, body[:200].decode(errors="replace").strip()
    try:
        error = json.loads(body)["error"]
        code, message = parts_of(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    kind = f"{status} {code}" if code and status != 429 and code != str(status) else str(status)
    return kind, f"{status} {message}".strip()


def parts_of(error: Any) -> tuple[str | None, str]:
    """Code and message of an error as OpenAI shapes it, or of whatever else came instead."""
    if not isinstance(error, dict):
        return None, str(error)[:200]
    code, message = error.get("code") or error.get("type"), error.get("message") or error
    return (str(code)[:60] if isinstance(code, (str, int)) else None), str(message)[:200]
