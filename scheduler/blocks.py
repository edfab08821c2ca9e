"""KV blocks: a pool of block ids and the table of one sequence. Counting only; the memory itself is the workers'."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockTable(list[int]):
    """Block ids of one sequence, in the order of its positions."""


class BlockPool:
    """`total` blocks of `block_size` tokens each. What is allocated equals what is freed."""

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of at least one token, got {total} x {block_size}")
        self.total = total
        self.block_size = block_size
        self._free: deque[int] = deque(range(total))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises ValueError for one that is not allocated: a double free is a bug, not a value."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not allocated")
            self._used.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Conservation: free + used = total, and no block in both. Raises ValueError otherwise."""
        if len(self._free) + len(self._used) != self.total or self._used & set(self._free):
            raise ValueError(f"blocks lost: {len(self._free)} free + {len(self._used)} used of {self.total}")
