"""What one HTTP request asks of the engine: its prompts, the engine's requests, and how their text is to be cut."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine import EngineInfo
from deploy.api.errors import ApiError, bad_request, shorten
from deploy.api.keys import Key
from deploy.api.prompts import Limits, Prompt, context_exceeded
from deploy.api.schemas import ChatRequest, CompletionRequest, Sampling
from deploy.api.settings import ApiSettings
from deploy.api.slo import asked_for
from scheduler.admission import Limits as AdmissionLimits
from scheduler.admission import check_request
from scheduler.errors import RequestRefused
from scheduler.request import Request
from scheduler.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat goes on to the end of the context."""


@dataclass(frozen=True, slots=True)
class Job:
    """`requests` are in the order of the answer's choices: n for the first prompt, n for the second, and so on."""

    id: str
    created: int
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    n: int
    stop: tuple[str, ...]
    user_stop_token_ids: frozenset[int]

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


def check_parameters(body: Sampling, vocab_size: int, settings: ApiSettings) -> None:
    """What the schema alone cannot know. Raises ApiError."""
    _check_stops(body, vocab_size, settings)
    _logit_bias(body, vocab_size, settings)
    if body.response_format is not None:
        with_schema = body.response_format.type == "json_schema"
        if with_schema != (body.response_format.json_schema is not None):
            told = "is missing" if with_schema else "is only allowed with type json_schema"
            param = "response_format.json_schema"
            raise bad_request(f"{param} {told}", param, "missing_required_parameter" if with_schema else None)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    if isinstance(body, CompletionRequest):
        if body.best_of is not None and body.best_of < body.n:
            raise bad_request(f"best_of must be at least n ({body.n}), got {body.best_of}", "best_of")
        if body.best_of is not None and body.best_of > body.n:
            raise bad_request("best_of above n is not supported by this server", "best_of", "unsupported_parameter")
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens can be 0 only with echo: there is no answer otherwise", "max_tokens")


def make_job(
    body: Sampling,
    prompts: Sequence[Prompt],
    info: EngineInfo,
    eos_token_ids: tuple[int, ...],
    settings: ApiSettings,
    arrived: float,
    slo_header: str | None = None,
    key: Key | None = None,
    json_schema: str = "",
) -> Job:
    """Everything that can be refused is refused here, before the engine hears of it. `arrived` is of time.monotonic.
    KV is reused among requests of keys of the same name only, where there are keys. With a `json_schema` each answer is
    JSON of it.

    Raises ApiError and RequestRefused.
    """
    most = min(settings.max_choices, info.most_requests)
    if len(prompts) * body.n > most:
        raise bad_request(f"{len(prompts)} prompts x n {body.n} are more than the limit of {most} choices", "n")
    promise, slo_class = asked_for(body, slo_header)
    chat = isinstance(body, ChatRequest)
    job_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    own_stops = () if body.ignore_eos else eos_token_ids
    logit_bias = _logit_bias(body, info.vocab_size, settings)
    requests = tuple(
        Request(
            request_id=f"{job_id}-{index * body.n + choice}",
            prompt=prompt.tokens,
            max_tokens=_max_tokens(body, len(prompt.tokens), info),
            sampling=_sampling(body, seed, choice, logit_bias, json_schema, eos_token_ids),
            stop_token_ids=tuple(dict.fromkeys((*own_stops, *body.stop_token_ids))),
            age_s=max(0.0, time.monotonic() - arrived),
            promise=promise,
            slo_class=slo_class,
            cache_salt=_salt(key, body.cache_salt or ""),
            tenant="" if key is None else key.name,
            weight=1.0 if key is None else key.weight,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(body.n)
    )
    for request in requests[:: body.n]:
        _check_admissible(request, info, chat)
    return Job(
        id=job_id,
        created=int(time.time()),
        prompts=tuple(prompts),
        requests=requests,
        n=body.n,
        stop=_stops(body),
        user_stop_token_ids=frozenset(body.stop_token_ids),
    )


def _salt(key: Key | None, chosen: str) -> str:
    """The name of a key has no colon, so that no salt that one chooses is another's."""
    return chosen if key is None else f"{key.name}:{chosen}"


def _check_admissible(request: Request, info: EngineInfo, chat: bool) -> None:
    """The engine's own rules, asked early: an answer of several choices is then refused whole, and by its own names."""
    try:
        limits = AdmissionLimits(info.max_model_len, info.vocab_size, info.num_blocks, info.block_size)
        check_request(request, limits)
    except RequestRefused as refused:
        param = "messages" if chat and refused.param == "prompt" else refused.param
        raise ApiError(400, refused.message, code=refused.code, param=param) from None


def _max_tokens(body: Sampling, prompt_tokens: int, info: EngineInfo) -> int:
    rest = info.max_model_len - prompt_tokens
    if rest < 1:
        limits = Limits(info.max_model_len, info.vocab_size)
        raise context_exceeded(prompt_tokens, limits, "messages" if isinstance(body, ChatRequest) else "prompt")
    wanted, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        wanted, name = body.max_completion_tokens, "max_completion_tokens"
    if wanted is None:
        return rest if isinstance(body, ChatRequest) else min(COMPLETION_MAX_TOKENS, rest)
    if wanted > rest:
        raise bad_request(
            f"This model's maximum context length is {info.max_model_len} tokens. {prompt_tokens} of them are in the "
            f"prompt, so {name} can be {rest} at most, not {shorten(_integer(wanted))}.",
            name,
            "context_length_exceeded",
        )
    return wanted


def _integer(value: int) -> str:
    return str(value) if value.bit_length() <= 256 else "a number of hundreds of digits"


def _sampling(
    body: Sampling,
    seed: int,
    choice: int,
    logit_bias: tuple[tuple[int, float], ...],
    json_schema: str,
    eos_token_ids: tuple[int, ...],
) -> SamplingParams:
    logprobs = body.top_logprobs_wanted if isinstance(body, (ChatRequest, CompletionRequest)) else None
    return SamplingParams(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=seed,
        choice=choice,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs_wanted if isinstance(body, CompletionRequest) else None,
        json_schema=json_schema,
        end_tokens=eos_token_ids if json_schema else (),
    )


def _stops(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _check_stops(body: Sampling, vocab_size: int, settings: ApiSettings) -> None:
    stops = _stops(body)
    if len(stops) > settings.max_stop_strings:
        raise bad_request(f"stop has {len(stops)} strings, but the limit is {settings.max_stop_strings}", "stop")
    for stop in stops:
        if not stop:
            raise bad_request("a stop string must not be empty", "stop")
        if len(stop) > settings.max_stop_characters:
            limit = settings.max_stop_characters
            raise bad_request(f"a stop string has {len(stop)} characters, but the limit is {limit}", "stop")
    if len(body.stop_token_ids) > settings.max_stop_token_ids:
        limit = settings.max_stop_token_ids
        raise bad_request(
            f"stop_token_ids has {len(body.stop_token_ids)} items, but the limit is {limit}", "stop_token_ids"
        )
    for token in body.stop_token_ids:
        if token >= vocab_size:
            raise bad_request(f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}", "stop_token_ids")


def _logit_bias(body: Sampling, vocab_size: int, settings: ApiSettings) -> tuple[tuple[int, float], ...]:
    if len(body.logit_bias) > settings.max_logit_bias:
        limit, first_over = settings.max_logit_bias, list(body.logit_bias)[settings.max_logit_bias]
        raise bad_request(
            f"logit_bias has {len(body.logit_bias)} entries, but the limit is {limit} "
            f"(key {shorten(repr(first_over))} is one too many)",
            "logit_bias",
        )
    biases = {}
    for key, bias in body.logit_bias.items():
        shown = shorten(repr(key))
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias: key {shown} is no token id", "logit_bias")
        token = int(key)
        if token >= vocab_size:
            raise bad_request(f"logit_bias: key {shown} is outside the vocabulary of {vocab_size}", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias: the bias of key {shown} must be between -100 and 100", "logit_bias")
        biases[token] = bias
    return tuple(biases.items())
