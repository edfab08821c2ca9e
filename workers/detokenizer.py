"""The text of tokens that come one by one: what was given out never changes, and joined it is the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST_HELD = 3
"""An unfinished UTF-8 sequence is three bytes at most, which decode to as many replacement characters at most."""
_CONTEXT_TOKENS = 6
_WINDOW_LIMIT = 48
_WINDOW_KEPT = 16
"""Tokens that are decoded again while characters stay unfinished: UTF-8 finds its feet again within four bytes."""


class Detokenizer:
    """Decodes a short window of tokens again for each new one, because a token's text depends on those around it.

    `decode` gives the text of token ids. Tokens in `skip` have no text. The last tokens of `prompt` are the first
    context, so that a space between prompt and answer is kept where decoding alone would strip it.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], skip: frozenset[int] = frozenset(), prompt: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._window = [token for token in prompt[-_CONTEXT_TOKENS:] if token not in skip]
        text = decode(self._window)
        if text.endswith(REPLACEMENT):  # the prompt ends inside a character: the answer is its own text
            self._window, text = [], ""
        self._settled = len(self._window)
        self._sent = len(text)

    def push(self, token: int) -> str:
        """The text that is certain now: all but a character at the end that is not complete."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = _trailing_replacements(text)
        ready = len(text) - held
        piece = text[self._sent : ready]
        self._sent = max(self._sent, ready)
        if held == 0:
            self._slide(self._settled, held)
            self._settled = len(self._window)
        elif len(self._window) > _WINDOW_LIMIT:
            self._slide(len(self._window) - _WINDOW_KEPT, held)
            self._settled = 0
        return piece

    def feed(self, tokens: Sequence[int]) -> str:
        """`push` for several tokens."""
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        """At the end: what was held back, which will not be completed any more."""
        text = self._decode(self._window)
        piece = text[self._sent :]
        self._sent = len(text)
        return piece

    def _slide(self, start: int, held: int) -> None:
        self._window = self._window[start:]
        self._sent = len(self._decode(self._window)) - held


def _trailing_replacements(text: str) -> int:
    count = 0
    while count < MOST_HELD and count < len(text) and text[-1 - count] == REPLACEMENT:
        count += 1
    return count
