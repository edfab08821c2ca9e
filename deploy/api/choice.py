"""One choice of an answer while it grows: from the engine's tokens to text, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from deploy.api.errors import ApiError
from deploy.api.stops import StopStrings
from scheduler.request import Delta, Finish, TokenLogprob
from workers.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token with its log-probability (None: it is the first of all). `offset` counts characters from the beginning of
    the text."""

    token: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in a choice. `finish_reason` is set once, on its last piece; `stop_reason` says what stopped it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenRecord, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """`offset` is where its text begins in what the client sees (after an echoed prompt). `scored` are the tokens of a
    prompt whose log-probabilities are to come first, each with the offset of its text."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        user_stops: frozenset[int],
        offset: int,
        scored: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._user_stops = user_stops
        self._characters = offset
        self._scored = scored
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False

    def take(self, delta: Delta) -> Piece:
        """Raises ApiError where the engine ended the request without success."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        text, used, stopped_by = "", 0, None
        records = self._prompt_records(delta)
        for token, logprob in zip_longest(delta.tokens, delta.logprobs):
            used += 1
            if logprob is not None:
                records.append(TokenRecord(token, logprob, self._characters))
            ready, stopped_by = self._add(self._detokenizer.push(token))
            text += ready
            if stopped_by is not None:
                break
        self.completion_tokens += used
        if stopped_by is None and delta.finish is not None:
            _check_success(delta)
            ready, stopped_by = self._add(self._detokenizer.flush())
            text += ready
            if stopped_by is None:
                text += self._stops.flush()
        self.finished = stopped_by is not None or delta.finish is not None
        finish_reason, stop_reason = self._reasons(delta, stopped_by)
        return Piece(text, delta.tokens[:used], tuple(records), finish_reason, stop_reason)

    def _prompt_records(self, delta: Delta) -> list[TokenRecord]:
        """Of the prompt, once. Of one that failed there may be fewer than tokens."""
        scored, self._scored = self._scored, ()
        if not scored:
            return []
        logprobs = (None, *delta.prompt_logprobs)
        return [TokenRecord(token, logprob, at) for (token, at), logprob in zip(scored, logprobs, strict=False)]

    def _add(self, text: str) -> tuple[str, str | None]:
        self._characters += len(text)
        return self._stops.push(text)

    def _reasons(self, delta: Delta, stopped_by: str | None) -> tuple[str | None, str | int | None]:
        if stopped_by is not None:
            return "stop", stopped_by
        if delta.finish is Finish.STOP:
            stop_token = int(delta.reason) if delta.reason and delta.reason.isdigit() else None
            return "stop", stop_token if stop_token in self._user_stops else None
        if delta.finish is Finish.LENGTH:
            return "length", delta.reason
        return None, None


def join(pieces: Sequence[Piece]) -> Piece:
    """Pieces in a row as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(record for piece in pieces for record in piece.logprobs),
        finish_reason=pieces[-1].finish_reason if pieces else None,
        stop_reason=pieces[-1].stop_reason if pieces else None,
    )


def _check_success(delta: Delta) -> None:
    if delta.finish is Finish.ERROR:
        raise ApiError(500, f"the engine failed this request: {delta.reason or 'unknown reason'}", code="engine_error")
    if delta.finish is Finish.ABORT:
        raise ApiError(503, "the server ended this request before it was complete", code="request_aborted")
