"""What a request must satisfy to be admitted. The last line of defence: whatever front end sent it, a request that
passes here can reach the workers without harm to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.errors import RequestRefused
from scheduler.request import Request
from scheduler.sampling import MAX_LOGPROBS, NOTHING_ASKED, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len` bounds prompt + generated tokens; the pool has `num_blocks` blocks of `block_size` tokens."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int


def check_request(request: Request, limits: Limits) -> None:
    """Raises RequestRefused with the numbers that decide."""
    _check_lengths(request, limits)
    check_tokens(request, limits)
    if request.sampling is not NOTHING_ASKED:
        check_sampling(request.sampling, limits.vocab_size)


def _check_lengths(request: Request, limits: Limits) -> None:
    prompt, wanted = len(request.prompt), request.max_tokens
    if prompt == 0:
        raise RequestRefused("invalid_request", "the prompt is empty", "prompt")
    if wanted < 0:
        raise RequestRefused("invalid_request", f"max_tokens must be at least 0, got {wanted}", "max_tokens")
    if request.produced and len(request.produced) >= wanted:
        raise RequestRefused("invalid_request", f"all {wanted} tokens have been produced already", "max_tokens")
    if prompt + wanted > limits.max_model_len:
        raise RequestRefused(
            "context_length_exceeded",
            f"prompt of {prompt} tokens plus max_tokens {wanted} is {prompt + wanted} tokens, "
            f"but the model's maximum is {limits.max_model_len}",
            "prompt" if prompt >= limits.max_model_len else "max_tokens",
        )
    context = prompt + len(request.produced)
    needed = -(-context // limits.block_size)
    if needed > limits.num_blocks:
        raise RequestRefused(
            "kv_capacity_exceeded",
            f"a context of {context} tokens needs {needed} KV blocks of {limits.block_size} tokens, "
            f"but the whole pool has {limits.num_blocks}",
            "prompt",
        )


def check_tokens(request: Request, limits: Limits) -> None:
    """Raises RequestRefused for one that the model does not have."""
    tokens = request.prompt + request.produced
    different = set(tokens)
    if not different or (min(different) >= 0 and max(different) < limits.vocab_size):
        return
    token = next(token for token in tokens if not 0 <= token < limits.vocab_size)
    raise RequestRefused(
        "invalid_request", f"token id {token} is outside the vocabulary of {limits.vocab_size}", "prompt"
    )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises RequestRefused naming the parameter. The ranges are OpenAI's, and vLLM's for what OpenAI does not have."""
    _in_range("temperature", sampling.temperature, 0, 100)
    _in_range("top_p", sampling.top_p, 0, 1)
    _in_range("min_p", sampling.min_p, 0, 1)
    _in_range("presence_penalty", sampling.presence_penalty, -2, 2)
    _in_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", sampling.repetition_penalty, 0, 100)
    if sampling.top_p == 0:
        raise RequestRefused("invalid_request", "top_p must be above 0", "top_p")
    if sampling.repetition_penalty == 0:
        raise RequestRefused("invalid_request", "repetition_penalty must be above 0", "repetition_penalty")
    if sampling.top_k < 0:
        raise RequestRefused("invalid_request", f"top_k must be 0 (off) or more, got {sampling.top_k}", "top_k")
    if not 0 <= sampling.seed < 2**64 or sampling.choice < 0:
        raise RequestRefused("invalid_request", "seed must be an integer of 64 bits", "seed")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestRefused("invalid_request", f"{name} must be between 0 and {MAX_LOGPROBS}, got {count}", name)
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestRefused(
                "invalid_request", f"logit_bias key {token} is outside the vocabulary of {vocab_size}", "logit_bias"
            )
        _in_range("logit_bias", bias, -100, 100)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestRefused("invalid_request", f"{name} must be between {low} and {high}, got {value}", name)
