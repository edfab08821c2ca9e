"""Prompts that nobody has seen before: random, so that no two share a prefix unless they are meant to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

VOCABULARY = range(1000, 30000)
"""Token ids that most tokenizers have, none of which is special in those of the Llama family."""
TRACE_BLOCK = 512
"""Tokens that one id of a Mooncake trace stands for."""

_COMMON = """
    apple bread river stone table chair green yellow summer winter morning evening garden forest mountain ocean bridge
    street market letter paper music dance horse bird fish tree flower cloud rain snow wind fire light shadow silver
    gold iron glass water coffee sugar salt butter kitchen window door floor wall roof house village city country train
    boat road corner circle square number color story song picture mirror clock hour minute week month year friend
    brother sister mother father child teacher doctor farmer driver writer player king queen soldier captain
"""
_WORDS = tuple(_COMMON.split())
"""One token each with most tokenizers, a space before it included."""


@dataclass(frozen=True, slots=True)
class RandomPrompt:
    """`tokens` of random content, the same for the same `seed`. It begins with `blocks`, of `block_tokens` each, whose
    content depends on their number and `shared_seed` alone: prompts with the same leading blocks share that prefix."""

    tokens: int
    seed: str
    blocks: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK
    shared_seed: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.block_tokens < 1:
            raise ValueError(f"a prompt and its blocks have at least 1 token, got {self.tokens}, {self.block_tokens}")

    def token_ids(self, vocabulary: range = VOCABULARY) -> list[int]:
        """Drawn from the `vocabulary`, which must have no special token in it."""
        ids: list[int] = []
        for source, count in self._parts():
            ids += source.choices(vocabulary, k=count)
        return ids

    def text(self) -> str:
        """As many common words as tokens are wanted; the number of tokens is about that, and the server knows it."""
        words: list[str] = []
        for source, count in self._parts():
            words += source.choices(_WORDS, k=count)
        return " ".join(words)

    def _parts(self) -> Iterator[tuple[Random, int]]:
        """Sources of randomness and how many tokens come from each."""
        left = self.tokens
        for block in self.blocks:
            if left <= 0:
                return
            yield Random(f"{self.shared_seed}/block/{block}"), min(left, self.block_tokens)
            left -= self.block_tokens
        if left > 0:
            yield Random(f"{self.seed}/own"), left
