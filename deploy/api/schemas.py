"""Bodies of the two generating endpoints. Strict: a string is no number, a bool is no integer, NaN is nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.api.errors import ApiError, bad_request, shorten
from deploy.api.fields import drop_what_asks_for_nothing
from scheduler.sampling import MAX_LOGPROBS
from scheduler.slo import LONGEST_PROMISE_S, SHORTEST_PROMISE_S

MAX_N = 128
"""OpenAI's bound on choices for one prompt."""

_Token = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """`include_usage`: one more event with the usage; `continuous_usage_stats`: the usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


_Milliseconds = Annotated[float, Field(ge=SHORTEST_PROMISE_S * 1e3, le=LONGEST_PROMISE_S * 1e3)]


class SloNumbers(Strict):
    """A promise in milliseconds: to the first token, per output token, and optionally for each single gap."""

    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds
    tbt_ms: _Milliseconds | None = None


class JsonSchema(Strict):
    """`strict` or not, the schema is kept to."""

    model_config = ConfigDict(populate_by_name=False, protected_namespaces=())

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`json_object`: any JSON object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Strict):
    """What both endpoints have. Defaults and ranges are OpenAI's; the second block is what vLLM's clients also use."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    n: int = Field(default=1, ge=1, le=MAX_N)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    stop_token_ids: list[_Token] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False

    slo: str | SloNumbers | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SHAPES: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}


class CompletionRequest(Sampling):
    """`prompt` is checked by hand (`prompts.parse_prompts`), because it may be long and has four shapes. With `echo`
    its text comes before the completion, which may be empty then, and its log-probabilities before those of that."""

    prompt: Any = Field(json_schema_extra=_PROMPT_SHAPES)
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    add_special_tokens: bool = True

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        return self.logprobs if self.echo else None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message. What a client sends back of our own answers (null or empty fields) is accepted and not used."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Schema = TypeVar("Schema", bound=Sampling)


def parse(schema: type[Schema], body: dict[str, Any]) -> Schema:
    """Raises ApiError naming the first field that is wrong."""
    fields = drop_what_asks_for_nothing(body, frozenset(schema.model_fields))
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None


def parse_slo(value: Any) -> SloNumbers:
    """A promise that came by another way than the body. Raises ApiError as `parse` does."""
    try:
        return SloNumbers.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, "slo") from None


def _first_error(error: ValidationError, inside: str | None = None) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    first = max(
        (found for found in errors if found["loc"][:1] == errors[0]["loc"][:1]), key=lambda found: len(found["loc"])
    )
    where = [part for part in (*([inside] if inside else []), *first["loc"]) if not _is_branch(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in where).lstrip(".")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing", param, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    said = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {said[:1].lower()}{said[1:]}, got {_shown(first['input'])}", param)


def _is_branch(part: int | str) -> bool:
    """Whether a part of the path names a branch of a union rather than something of the client's."""
    return isinstance(part, str) and part in ("str", "list[str]", "list[TextPart]", "SloNumbers")


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a very large integer"
    return shorten(repr(value))
