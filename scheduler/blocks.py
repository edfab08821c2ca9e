"""KV blocks: a pool of block ids and the table of one sequence. Counting only; the memory itself is the workers'.

A block is free, referenced (by one sequence or several), or cached: nobody holds it, but what it holds is known by a
digest and may be wanted again. Cached blocks are given away only when no free one is left, least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache

from scheduler.directory import Directory


class BlockTable(list[int]):
    """Block ids of one sequence, in the order of its positions."""


@lru_cache(maxsize=8)
def _numbers(total: int) -> tuple[int, ...]:
    """Of the blocks of a pool: a thousand pools of one size have the same numbers in memory."""
    return tuple(range(total))


class BlockPool:
    """`total` blocks of `block_size` tokens each: free + cached + referenced. The `directory` has the digests that it
    knows blocks by, beside those of other pools."""

    __slots__ = (
        "_digests", "_free", "_known", "_references", "_unheld", "block_size", "directory", "evictions",
        "total",
    )  # fmt: skip

    def __init__(self, total: int, block_size: int, directory: Directory | None = None) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one token, got {total} x {block_size}")
        self.total = total
        self.block_size = block_size
        self.evictions = 0
        self._free: deque[int] = deque(_numbers(total))
        self._references: dict[int, int] = {}
        self._unheld: dict[int, None] = {}  # known by a digest and referenced by nobody, least recently used first
        self._digests: list[bytes | None] = [None] * total
        self._known: dict[bytes, int] = {}
        self.directory = Directory() if directory is None else directory

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold something which may be wanted again, and that nobody holds now."""
        return len(self._unheld)

    @property
    def referenced(self) -> int:
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that can be given away: free and cached ones."""
        return len(self._free) + len(self._unheld)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    # Taking and giving back.

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks to write to, or None (and nothing taken) where fewer are available."""
        if count > self.available:
            return None
        taken = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, to read only. Raises ValueError for one that is free."""
        for block in blocks:
            if self._digests[block] is None:
                raise ValueError(f"block {block} holds nothing that is known")
            self._unheld.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each, whatever it holds. Raises ValueError for one that is not referenced."""
        for block in blocks:
            if block not in self._references:
                raise ValueError(f"block {block} is not referenced")
            self._references[block] += 1

    def release(self, blocks: Seq[int]) -> None:
        """Give blocks of a sequence back, in the order of its positions: the last ones are reused first, since those
        before them are of use without them, and they are of none without those before.

        Raises ValueError for one that is not referenced: a double free is a bug, not a value.
        """
        for block in reversed(blocks):
            references = self._references.get(block)
            if references is None:
                raise ValueError(f"block {block} is not referenced")
            if references > 1:
                self._references[block] = references - 1
                continue
            del self._references[block]
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._unheld[block] = None

    # What they hold.

    def find(self, digest: bytes) -> int | None:
        """The block that is known by a digest. Of what no pool knows, the one directory of all is asked: who asks one
        pool after the other finds it in its caches."""
        return self._known.get(digest) if digest in self.directory else None

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(block in self._unheld for block in blocks)

    def know(self, block: int, digest: bytes) -> None:
        """A referenced block is full and computed. The first one of equal content is known, others are not."""
        if block not in self._references:
            raise ValueError(f"block {block} is not referenced")
        if digest not in self._known and self._digests[block] is None:
            self._known[digest] = block
            self._digests[block] = digest
            self.directory.add(digest, self)

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody new may share these blocks: what they hold is lost, or not to be trusted."""
        for block in blocks:
            if self._lose(block) and block in self._unheld:
                del self._unheld[block]
                self._free.append(block)

    def forget_all(self) -> None:
        self.forget(list(self._known.values()))

    def _evict(self) -> int:
        block = next(iter(self._unheld))
        del self._unheld[block]
        self._lose(block)
        self.evictions += 1
        return block

    def _lose(self, block: int) -> bool:
        """Whether it was known what it holds; now it is not."""
        digest, self._digests[block] = self._digests[block], None
        if digest is None:
            return False
        del self._known[digest]
        self.directory.remove(digest, self)
        return True

    def check(self, held: Iterable[Seq[int]]) -> None:
        """Conservation, for the tables that hold the referenced blocks. Raises ValueError naming what broke."""
        counts: dict[int, int] = {}
        for table in held:
            if len(set(table)) < len(table):
                raise ValueError(f"a table has a block twice: {table}")
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        if counts != self._references:
            raise ValueError(f"{len(counts)} blocks are held by sequences, {len(self._references)} are referenced")
        states = [*self._free, *self._unheld, *self._references]
        if len(states) != self.total or set(states) != set(range(self.total)):
            raise ValueError(
                f"blocks lost: {self.free} free + {self.cached} cached + {self.referenced} referenced of {self.total}"
            )
        known = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        if not self._unheld.keys() <= known.keys() or self._known != {digest: block for block, digest in known.items()}:
            raise ValueError("a digest is known of no block, or of two")
