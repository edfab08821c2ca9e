"""KV of sequences that gave their blocks up, kept in host memory until they come back. Counting only, as for blocks."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.blocks import BlockPool
from scheduler.plan import Swap
from scheduler.request import Sequence


class HostPool:
    """`total` blocks of host memory, each of which holds what a block of KV does; none: nothing is ever kept.

    What is to be copied is told to the workers in the order in which it was decided, before anything else that a plan
    does with KV: blocks that a sequence gives up may be written in the same plan, and what is copied out may be copied
    back in it.
    """

    __slots__ = ("_free", "_pool", "_swaps", "copied_in", "copied_out", "total")

    def __init__(self, total: int, pool: BlockPool) -> None:
        self.total = total
        self.copied_out = 0
        self.copied_in = 0
        self._pool = pool
        self._free = list(range(total - 1, -1, -1))
        self._swaps: list[Swap] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def told(self) -> bool:
        """Whether all that was decided is in a plan: until then what a block held may still have to be copied out."""
        return not self._swaps

    def keep(self, sequence: Sequence) -> None:
        """Copy out what has been computed of a sequence that still holds its blocks. Where there is no room for all of
        it nothing is kept, and it is computed again."""
        count = self._pool.blocks_for(sequence.computed)
        if not 0 < count <= self.free:
            return
        sequence.kept = [self._free.pop() for _ in range(count)]
        sequence.kept_tokens = sequence.computed
        self._swaps.append(Swap(True, tuple(sequence.blocks[:count]), tuple(sequence.kept)))
        self.copied_out += count

    def restore(self, sequence: Sequence) -> None:
        """Copy back what is kept of a sequence that has its blocks again, but for those that begin it and are another's
        (`computed` tokens). Its host memory is free after that."""
        if sequence.kept_tokens > sequence.computed:
            first = sequence.computed // self._pool.block_size
            missing = tuple(sequence.kept[first:])
            self._swaps.append(Swap(False, tuple(sequence.blocks[first : len(sequence.kept)]), missing))
            self.copied_in += len(missing)
            sequence.computed = sequence.kept_tokens
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants what is kept of it any more, or it is lost."""
        self._free += reversed(sequence.kept)
        sequence.kept, sequence.kept_tokens = [], 0

    def take_swaps(self) -> tuple[Swap, ...]:
        """What was decided since the last call."""
        if not self._swaps:
            return ()
        swaps, self._swaps = self._swaps, []
        return tuple(swaps)

    def forget_workers(self) -> None:
        """There is nobody to copy, and nothing left to be copied."""
        self._swaps.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Conservation, for all sequences there are. Raises ValueError naming what broke."""
        kept = [block for sequence in sequences for block in sequence.kept]
        if sorted(kept + self._free) != list(range(self.total)):
            raise ValueError(f"host blocks lost: {self.free} free + {len(kept)} in use of {self.total}")
