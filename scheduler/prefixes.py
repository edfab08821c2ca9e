"""Prefix reuse: which blocks hold the KV of the tokens that a sequence begins with.

A full block is known by a digest of its tokens and of the digest before it, so that equal digests mean equal tokens
from the first one on (and the same salt). Digests are keyed with bytes that no client knows and have 128 bits: nobody
can make a prompt whose digest is that of another's block. Only full blocks are shared, and nobody writes to a full
block, so that sharing needs no copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from scheduler.blocks import BlockPool
from scheduler.request import Phase, Sequence

DIGEST_BYTES = 16
WORTH_WAITING = 256
"""Tokens in common with a prompt that is being computed for which another waits, or half of what it has left."""
PATIENCE = 4
"""Iterations without a chunk after which a prompt holds nobody up any more."""


class Written(NamedTuple):
    """A sequence's positions from `start` to before `end` are written by a plan, and a block gets full by that.

    `life` are its preemptions at that time: after one more its blocks are others'.
    """

    sequence: Sequence
    life: int
    start: int
    end: int

    @property
    def still_there(self) -> bool:
        return self.sequence.phase is Phase.RUNNING and self.sequence.preemptions == self.life


class Prefixes:
    """`queried` and `hit` count tokens of requests when they begin, `key` are 16 to 64 secret bytes."""

    __slots__ = ("_keyed", "_pool", "_salted", "enabled", "hit", "queried")

    def __init__(self, pool: BlockPool, *, enabled: bool, key: bytes) -> None:
        self.enabled = enabled
        self.queried = 0
        self.hit = 0
        self._pool = pool
        self._keyed = blake2b(key=key, digest_size=DIGEST_BYTES)
        self._salted = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"salt")

    # What is there.

    def found(self, sequence: Sequence, first: int = 0) -> list[int]:
        """Blocks that hold what it begins with, from its block `first` on.

        At least one of its tokens is left to be computed, or there were no logits to sample from.
        """
        blocks: list[int] = []
        if self.enabled:
            for index in range(first, self._shareable(sequence)):
                block = self._pool.find(self._digest(sequence, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def shared_by(self, other: Sequence, sequence: Sequence) -> int:
        """Tokens that one who came just before it will have computed for it: another choice of the same prompt."""
        alike = self.enabled and other.tokens == sequence.tokens
        if not alike or other.request.cache_salt != sequence.request.cache_salt:
            return 0
        return self._shareable(sequence) * self._pool.block_size

    def digests(self, sequence: Sequence) -> Iterator[bytes]:
        """Of the blocks that it could find, from its first one on, each worked out when it is asked for."""
        if self.enabled:
            for index in range(self._shareable(sequence)):
                yield self._digest(sequence, index)

    def enter(self, sequence: Sequence, shared: Seq[int]) -> None:
        """It begins with these blocks of others, which have been put into its table."""
        if sequence.preemptions == 0:
            self.queried += sequence.length
        sequence.known_blocks = len(shared)
        self._skip(sequence, len(shared))

    def catch_up(self, sequence: Sequence) -> None:
        """Skip what somebody else has computed since it entered: the blocks that it held for that are free again."""
        first, within = divmod(sequence.computed, self._pool.block_size)
        if within or sequence.blocks_sent > first:
            return
        shared = self.found(sequence, first)
        if not shared:
            return
        self._pool.share(shared)
        end = first + len(shared)
        self._pool.release(sequence.blocks[first:end])
        sequence.blocks[first:end] = shared
        if sequence.known_blocks == first:
            sequence.known_blocks = end
        self._skip(sequence, len(shared))

    def _skip(self, sequence: Sequence, blocks: int) -> None:
        tokens = blocks * self._pool.block_size
        sequence.computed += tokens
        if sequence.preemptions == 0:
            self.hit += tokens
            sequence.cached_tokens = min(sequence.cached_tokens + tokens, len(sequence.request.prompt))

    # What becomes known.

    def learn(self, written: Iterable[Written], failed: Seq[Sequence]) -> None:
        """A plan was carried out: the blocks that it filled may be shared from now on, but for those of sequences that
        `failed`: who knows what they hold."""
        if not self.enabled:
            return
        for entry in written:
            sequence = entry.sequence
            if not entry.still_there or sequence in failed:
                continue
            full = min(entry.end, len(sequence.tokens)) // self._pool.block_size
            for index in range(sequence.known_blocks, full):
                self._pool.know(sequence.blocks[index], self._digest(sequence, index))
            sequence.known_blocks = max(sequence.known_blocks, full)

    # Who waits for whom.

    def worth_computing(self, prefills: Seq[Sequence], under_way: Iterable[Written], iteration: int) -> Seq[Sequence]:
        """Without those that will soon find computed what they have in common with another prompt. First of all, each
        skips what it finds now.

        Of prompts that go on alike one leads, that with the tightest promise. The others wait as long as it gets on,
        and also for the plans under way, which end in any case. The oldest of all waits for nobody.
        """
        if not self.enabled or not prefills:
            return prefills
        for sequence in prefills:
            self.catch_up(sequence)
        coming = self._coming(under_way)
        if len(prefills) == 1 and not coming:
            return prefills
        groups: dict[bytes, list[Sequence]] = {}
        for sequence in prefills:
            index = sequence.computed // self._pool.block_size
            if index < self._shareable(sequence):
                groups.setdefault(self._digest(sequence, index), []).append(sequence)
        held = {
            sequence.order
            for digest, group in groups.items()
            if len(group) > 1 or digest in coming
            for sequence in self._held(group, prefills[0], coming, iteration)
        }
        return [sequence for sequence in prefills if sequence.order not in held] if held else prefills

    def _held(self, group: Seq[Sequence], oldest: Sequence, coming: set[bytes], iteration: int) -> list[Sequence]:
        getting_on = [sequence for sequence in group if iteration - sequence.chunk_at <= PATIENCE]
        leader = min(getting_on, key=lambda s: (s.promise.ttft_s, s.order), default=None)
        return [
            sequence
            for sequence in group
            if sequence.computed % self._pool.block_size == 0
            and self._is_spared_much(sequence, None if sequence in (leader, oldest) else leader, coming)
        ]

    def _is_spared_much(self, sequence: Sequence, leader: Sequence | None, coming: set[bytes]) -> bool:
        """By what is coming, or by what it has in common with the leader: equal so far is equal from the beginning."""
        size = self._pool.block_size
        first, tokens = sequence.computed // size, min(WORTH_WAITING, sequence.prefill_remaining // 2)
        last = first + max(1, -(-tokens // size)) - 1
        if last >= self._shareable(sequence):
            return False
        digest = self._digest(sequence, last)
        if digest in coming:
            return True
        return leader is not None and last < leader.length // size and self._digest(leader, last) == digest

    def _coming(self, under_way: Iterable[Written]) -> set[bytes]:
        """Digests of the blocks of prompts that plans under way fill."""
        size = self._pool.block_size
        return {
            self._digest(entry.sequence, index)
            for entry in under_way
            if entry.still_there and entry.end <= entry.sequence.prefill_target
            for index in range(entry.start // size, entry.end // size)
        }

    # Digests.

    def _shareable(self, sequence: Sequence) -> int:
        """Its full blocks that somebody else may have computed for it."""
        if sequence.scores_wanted and sequence.computes_itself:
            return 0
        return (sequence.length - 1) // self._pool.block_size

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """Of its full block `index`, and all before. What was found out once is kept: tokens never change."""
        digests, size = sequence.digests, self._pool.block_size
        while len(digests) <= index:
            start = len(digests) * size
            chained = self._keyed.copy()
            chained.update(digests[-1] if digests else self._root(sequence.request.cache_salt))
            chained.update(array("I", sequence.tokens[start : start + size]))
            digests.append(chained.digest())
        return digests[index]

    def _root(self, salt: str) -> bytes:
        salted = self._salted.copy()
        salted.update(salt.encode("utf-8", "surrogatepass"))
        return salted.digest()
