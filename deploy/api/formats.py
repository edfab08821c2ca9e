"""How a choice looks on the wire: what completions and chats have in common, as data. One format per HTTP request."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from deploy.api.choice import Choice, Piece, TokenRecord
from deploy.api.job import Job
from workers.tokenizer import Tokenizer

JsonObject = dict[str, Any]

_LOWEST_LOGPROB = -9999.0
"""For a token that cannot come: JSON has no infinity, and OpenAI writes it so."""


class Format(ABC):
    """`kind` and `chunk_kind` are the answer's `object` names."""

    kind: str
    chunk_kind: str

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer, with_token_ids: bool, with_logprobs: bool) -> None:
        self.job = job
        self.model = model
        self.tokenizer = tokenizer
        self.with_token_ids = with_token_ids
        self.with_logprobs = with_logprobs

    def response(self, pieces: Sequence[Piece], usage: JsonObject) -> JsonObject:
        """The whole answer of a request that is not streamed."""
        choices = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        return {**self.envelope(self.kind), "choices": choices, "usage": usage}

    def chunk(self, choices: list[JsonObject]) -> JsonObject:
        """One event of a stream."""
        return {**self.envelope(self.chunk_kind), "choices": choices}

    def envelope(self, kind: str) -> JsonObject:
        return {"id": self.job.id, "object": kind, "created": self.job.created, "model": self.model}

    @abstractmethod
    def opening(self, index: int) -> list[JsonObject]:
        """Choices of events that come before the first piece of a streamed choice."""

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> JsonObject: ...

    @abstractmethod
    def delta(self, index: int, piece: Piece, first: bool) -> JsonObject: ...

    def ending(self, piece: Piece) -> JsonObject:
        """`stop_reason` (the stop string or token id, or `kv_capacity`) and token ids are vLLM's additions."""
        end: JsonObject = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if self.with_token_ids:
            end["token_ids"] = list(piece.token_ids)
        return end

    def escaped(self, token: int, prefix: str = "") -> str:
        """A token's text; bytes that are no text by themselves are written as \\x escapes."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def usage_of(job: Job, choices: Sequence[Choice]) -> JsonObject:
    """Tokens of the whole request so far, all choices together; a prompt counts once however many choices it has."""
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices[:: job.n])
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


class CompletionFormat(Format):
    """`echo` holds the text that is put before each choice, one for each prompt, or nothing."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, echo: Sequence[str] = ()) -> None:
        super().__init__(*arguments)
        self._echo = echo

    def echoed(self, index: int) -> str:
        return self._echo[index // self.job.n] if self._echo else ""

    def opening(self, index: int) -> list[JsonObject]:
        return []

    def choice(self, index: int, piece: Piece) -> JsonObject:
        return self.delta(index, piece, first=True)

    def delta(self, index: int, piece: Piece, first: bool) -> JsonObject:
        text = self.echoed(index) + piece.text if first else piece.text
        logprobs = self._logprobs(piece.logprobs) if self.with_logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, **self.ending(piece)}
        if self.with_token_ids and first:
            choice["prompt_token_ids"] = list(self.job.prompt_of(index).tokens)
        return choice

    def _logprobs(self, records: Sequence[TokenRecord]) -> JsonObject:
        return {
            "tokens": [self.escaped(record.token, "bytes:") for record in records],
            "token_logprobs": [finite(r.logprob.logprob) if r.logprob is not None else None for r in records],
            "top_logprobs": [self._top(record) for record in records],
            "text_offset": [record.offset for record in records],
        }

    def _top(self, record: TokenRecord) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one. Where two have the same text, the likelier one counts."""
        if record.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*record.logprob.top, (record.token, record.logprob.logprob)):
            top.setdefault(self.escaped(token, "bytes:"), finite(logprob))
        return top


class ChatFormat(Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def response(self, pieces: Sequence[Piece], usage: JsonObject) -> JsonObject:
        answer = super().response(pieces, usage)
        if self.with_token_ids:
            answer["prompt_token_ids"] = list(self.job.prompts[0].tokens)
        return answer

    def opening(self, index: int) -> list[JsonObject]:
        """The role, with the first token or after it and never before: it is no sign of progress by itself."""
        role = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, piece: Piece) -> JsonObject:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(piece), **self.ending(piece)}

    def delta(self, index: int, piece: Piece, first: bool) -> JsonObject:
        content = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": content, "logprobs": self._logprobs(piece), **self.ending(piece)}

    def _logprobs(self, piece: Piece) -> JsonObject | None:
        if not self.with_logprobs or (not piece.logprobs and not piece.text):
            return None
        return {"content": [self._record(record) for record in piece.logprobs], "refusal": None}

    def _record(self, record: TokenRecord) -> JsonObject:
        assert record.logprob is not None  # a chat has no echo
        top = [self._token(token, logprob) for token, logprob in record.logprob.top]
        return {**self._token(record.token, record.logprob.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> JsonObject:
        raw = list(self.tokenizer.token_bytes(token))
        return {"token": self.escaped(token), "logprob": finite(logprob), "bytes": raw}
