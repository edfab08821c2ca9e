"""What the model is to continue: from a body's `prompt` or `messages` to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from deploy.api.echo import Echo, echo_of
from deploy.api.errors import ApiError, bad_request, shorten
from deploy.api.schemas import ChatRequest, Message
from deploy.api.settings import ApiSettings
from workers.tokenizer import ChatTemplateError, Tokenizer

Result = TypeVar("Result")
RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len` bounds prompt + generated tokens of a sequence."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where the client gave token ids."""

    tokens: tuple[int, ...]
    text: str | None


def context_exceeded(tokens: int, limits: Limits, param: str) -> ApiError:
    return bad_request(
        f"This model's maximum context length is {limits.max_model_len} tokens, of which at least one is generated, "
        f"but the prompt has {tokens} tokens.",
        param,
        "context_length_exceeded",
    )


def parse_prompts(value: Any, limits: Limits, settings: ApiSettings) -> list[RawPrompt]:
    """The four shapes of a completion's prompt: text, texts, token ids, lists of token ids. Raises ApiError."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        prompts = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        raise bad_request("prompt must be a string, an array of strings, or token ids", "prompt")
    if not prompts:
        raise bad_request("prompt must not be empty", "prompt")
    if len(prompts) > settings.max_prompts:
        raise bad_request(f"prompt has {len(prompts)} items, but the limit is {settings.max_prompts}", "prompt")
    if not all(isinstance(item, type(prompts[0])) for item in prompts):
        raise bad_request("prompt must not mix strings and token ids", "prompt")
    for item in prompts:
        _check_prompt(item, limits)
    return prompts


def _check_prompt(item: Any, limits: Limits) -> None:
    if not isinstance(item, (str, list)):
        raise bad_request("prompt must be a string, an array of strings, or token ids", "prompt")
    if not item:
        raise bad_request("prompt must not be empty", "prompt")
    if isinstance(item, list):
        if len(item) >= limits.max_model_len:
            raise context_exceeded(len(item), limits, "prompt")
        for token in item:
            if type(token) is not int:
                raise bad_request(f"prompt: token ids must be integers, got {shorten(repr(token))}", "prompt")
            if not 0 <= token < limits.vocab_size:
                raise bad_request(
                    f"prompt: token id {shorten(token)} is outside the vocabulary of {limits.vocab_size}", "prompt"
                )


def parse_messages(request: ChatRequest, settings: ApiSettings) -> list[dict[str, str]]:
    """Messages as a template takes them. Raises ApiError."""
    if len(request.messages) > settings.max_messages:
        raise bad_request(
            f"messages has {len(request.messages)} items, but the limit is {settings.max_messages}", "messages"
        )
    for index, message in enumerate(request.messages):
        _check_extras(message, f"messages[{index}]")
    if request.continue_final_message:
        if "add_generation_prompt" in request.model_fields_set and request.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if request.messages[-1].role != "assistant":
            raise bad_request("continue_final_message needs a last message of the assistant", "continue_final_message")
    return [{"role": _role(message), "content": message.text} for message in request.messages]


_UNUSED_IN_MESSAGES = frozenset({"name", "refusal", "annotations", "reasoning", "reasoning_content"})
_UNSUPPORTED_IN_MESSAGES = frozenset({"tool_calls", "tool_call_id", "function_call", "audio"})


def _check_extras(message: Message, where: str) -> None:
    for name, value in (message.model_extra or {}).items():
        if name in _UNUSED_IN_MESSAGES or value is None or value == []:
            continue
        param = f"{where}.{shorten(name)}"
        if name in _UNSUPPORTED_IN_MESSAGES:
            raise bad_request(f"{param} is not supported by this server", param, "unsupported_parameter")
        raise bad_request(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


class Encoder:
    """Tokenizes on a few threads of its own, so that neither the event loop nor running streams wait for it."""

    def __init__(self, tokenizer: Tokenizer, threads: Executor, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._threads = threads
        self._limits = limits

    async def prompts(self, raw: Sequence[RawPrompt], add_special_tokens: bool) -> list[Prompt]:
        """Raises ApiError where a prompt has no tokens or too many."""

        def encode() -> list[Prompt]:
            return [self._encode(item, add_special_tokens) for item in raw]

        return await self._on_thread(encode)

    async def echoes(self, prompts: Sequence[Prompt], scored: bool) -> list[Echo]:
        """How each is echoed; with `scored`, where its tokens begin."""
        return await self._on_thread(
            lambda: [echo_of(prompt.tokens, prompt.text, self._tokenizer, scored) for prompt in prompts]
        )

    async def chat(self, request: ChatRequest, messages: list[dict[str, str]]) -> Prompt:
        """Raises ApiError where the template refuses the messages, or the prompt has too many tokens."""

        def encode() -> Prompt:
            tokens = self._tokenizer.encode_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                template_arguments=request.chat_template_kwargs,
            )
            return self._checked(Prompt(tuple(tokens), None), "messages")

        try:
            return await self._on_thread(encode)
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages") from None

    def _encode(self, item: RawPrompt, add_special_tokens: bool) -> Prompt:
        if isinstance(item, list):
            return Prompt(tuple(item), None)
        return self._checked(Prompt(tuple(self._tokenizer.encode(item, add_special_tokens)), item), "prompt")

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        if not prompt.tokens:
            raise bad_request(f"{param} has no tokens", param)
        if len(prompt.tokens) >= self._limits.max_model_len:
            raise context_exceeded(len(prompt.tokens), self._limits, param)
        return prompt

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
