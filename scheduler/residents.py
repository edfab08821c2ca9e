"""The sequences that hold a slot and KV blocks, and what the workers have yet to hear of it."""

from __future__ import annotations

from scheduler.blocks import BlockPool
from scheduler.line import Line
from scheduler.plan import Admission
from scheduler.prefixes import Prefixes
from scheduler.request import Sequence


class Residents:
    """Slots and blocks of one worker group, and who holds them.

    The workers follow by plans: what a plan frees may be given away in the same plan, for releases come first.
    """

    def __init__(self, slots: int, pool: BlockPool, prefixes: Prefixes) -> None:
        self.line = Line()
        self._pool = pool
        self._prefixes = prefixes
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._entering: dict[int, Sequence] = {}
        self._leaving: list[int] = []

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def enter(self, sequence: Sequence) -> bool:
        """Give it a slot and the blocks of its whole context. False, and nothing given, where they are not there.

        What others have computed of it already is shared with them. Every stream may want one more block soon: a
        newcomer that takes the last ones would be thrown out again.
        """
        if not self._free_slots:
            return False
        shared = self._prefixes.found(sequence)
        needed = self._pool.blocks_for(sequence.length) - len(shared)
        if self._pool.available - self._pool.unheld(shared) - needed < len(self.line):
            return False
        self._pool.share(shared)
        own = self._pool.allocate(needed)
        assert own is not None  # so many are available
        sequence.slot = self._free_slots.pop()
        sequence.blocks.extend(shared)
        sequence.blocks.extend(own)
        sequence.prefill_target = sequence.length
        self._prefixes.enter(sequence, shared)
        self.line.join(sequence)
        self._entering[sequence.slot] = sequence
        return True

    def vacate(self, sequence: Sequence) -> None:
        """Take its slot and its blocks away. What was computed may still be there when it comes back."""
        self.line.leave(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks.clear()
        sequence.blocks_sent = sequence.known_blocks = sequence.computed = sequence.prefill_target = 0
        if self._entering.pop(sequence.slot, None) is None:  # else no worker has heard of it yet
            self._leaving.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Give it the blocks for `count` more tokens. False, and nothing given, where they are not there."""
        missing = self._pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            sequence.blocks.extend(blocks)
        return True

    def take_admissions(self) -> tuple[Admission, ...]:
        """Of those that entered since the last call."""
        entering, self._entering = self._entering, {}
        return tuple(
            Admission(slot, tuple(sequence.tokens), len(sequence.request.prompt), sequence.request.sampling)
            for slot, sequence in entering.items()
        )

    def take_releases(self) -> tuple[int, ...]:
        """Slots that were vacated since the last call, of those that workers know to be taken."""
        leaving, self._leaving = self._leaving, []
        return tuple(leaving)

    def forget_workers(self) -> None:
        """The workers are new: they have no slot taken, and their blocks hold nothing."""
        self._leaving.clear()
        self._pool.forget_all()

    def check(self) -> None:
        """Conservation of slots and blocks. Raises ValueError naming what broke."""
        self._pool.check(sequence.blocks for sequence in self.line)
        slots = [sequence.slot for sequence in self.line] + self._free_slots
        if sorted(slots) != list(range(self._slots)):
            raise ValueError(f"slots lost or given twice: {sorted(slots)}")
