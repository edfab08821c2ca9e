"""A prompt as it is echoed: its text, and where in it each of its tokens begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`scored` are the prompt's tokens with the offsets of their text, where log-probabilities of them are wanted."""

    text: str
    scored: tuple[tuple[int, int], ...] = ()


def echo_of(tokens: Sequence[int], given: str | None, tokenizer: Tokenizer, scored: bool) -> Echo:
    """`given` is the prompt's text, None where the client gave token ids.

    Special tokens have a place where the client wrote them, not where the tokenizer put them in by itself.
    """
    text = tokenizer.decode(tokens) if given is None else given
    if not scored:
        return Echo(text)
    offsets, end = _offsets(tokens, tokenizer, skip_special_tokens=given is None)
    if end != len(text) and given is not None:
        offsets, _ = _offsets(tokens, tokenizer, skip_special_tokens=True)
    return Echo(text, tuple((token, min(at, len(text))) for token, at in zip(tokens, offsets, strict=True)))


def _offsets(tokens: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool) -> tuple[list[int], int]:
    """Of each token, and of the end: characters of the text that is certain before it."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(detokenizer.push(token))
    return offsets, end + len(detokenizer.flush())
