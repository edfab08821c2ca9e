"""The sequences that hold a slot and KV blocks, and what the workers have yet to hear of it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from scheduler.blocks import BlockPool, BlockTable
from scheduler.plan import Admission
from scheduler.prefixes import Prefixes
from scheduler.request import Sequence
from scheduler.running import Running
from scheduler.swap import HostPool

MOST_PREEMPTIONS = 3
"""How often a sequence gives way for want of blocks; after that it is settled."""


def settled(sequence: Sequence) -> bool:
    """Whether it has given way as often as it has to."""
    return sequence.gave_way >= MOST_PREEMPTIONS


class Residents:
    """Slots and blocks of one worker group, and who holds them.

    The workers follow by plans: what a plan frees may be given away in the same plan, for releases come first.
    """

    __slots__ = ("_arriving", "_entering", "_free_slots", "_leaving", "_pool", "_prefixes", "_slots", "host", "line")

    def __init__(self, slots: int, pool: BlockPool, prefixes: Prefixes, host: HostPool) -> None:
        self.line = Running(pool.block_size)
        self._pool = pool
        self._prefixes = prefixes
        self.host = host
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))
        self._entering: dict[int, Sequence] = {}
        self._leaving: list[int] = []
        self._arriving = 0

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def enter(self, sequence: Sequence) -> bool:
        """Give it a slot and the blocks of its whole context. False, and nothing given, where they are not there.

        What others have computed of it already is shared with them. Every stream may want one more block soon: a
        newcomer that takes the last ones would be thrown out again. Who has given way often enough gets all the blocks
        that it can ever want, so that it neither wants another's nor has to give way again.
        """
        room = self._take_room(sequence, _tokens_here(sequence))
        if room is None:
            return False
        sequence.slot, blocks, shared = room
        sequence.blocks.extend(blocks)
        sequence.prefill_target = sequence.length
        self._prefixes.enter(sequence, blocks[:shared])
        self.host.restore(sequence)
        self.line.join(sequence)
        self._entering[sequence.slot] = sequence
        return True

    def _take_room(self, sequence: Sequence, tokens: int) -> tuple[int, BlockTable, int] | None:
        """A slot, and blocks for so many of its tokens, of which the first are shared: how many. None, and nothing
        taken, where there is no room."""
        shared = self._prefixes.found(sequence)
        if self._left(shared, tokens) is None:
            return None
        self._pool.share(shared)
        own = self._pool.allocate(self._blocks_for(tokens) - len(shared))
        assert own is not None  # so many are available
        return self._free_slots.pop(), BlockTable([*shared, *own]), len(shared)

    def _left(self, shared: Seq[int], tokens: int) -> int | None:
        """Blocks available beside those of so many tokens; None where that leaves the streams none."""
        if not self._free_slots:
            return None
        left = self._available_beside(shared, tokens)
        return left if left >= self._kept_for_streams else None

    def missing_for(self, sequence: Sequence) -> tuple[int, int]:
        """Slots and blocks that it does not find."""
        left = self._available_beside(self._prefixes.found(sequence), _tokens_here(sequence))
        return 1 - len(self._free_slots), self._kept_for_streams - left

    @property
    def _kept_for_streams(self) -> int:
        """Blocks: one for each that is here, or on its way."""
        return len(self.line) + self._arriving

    def _available_beside(self, shared: Seq[int], tokens: int) -> int:
        """Blocks, less than none where there are not enough for the tokens that are not `shared`."""
        return self._pool.available - self._pool.unheld(shared) - (self._blocks_for(tokens) - len(shared))

    def _blocks_for(self, tokens: int) -> int:
        """No more than there are: what outgrows the whole pool ends alone."""
        return min(self._pool.blocks_for(tokens), self._pool.total)

    # Places for sequences that are computed in another group.

    def room_for(self, sequence: Sequence) -> int | None:
        """Blocks that would be left available beside its context and one more token; None where there is no room."""
        return self._left(self._prefixes.found(sequence), _tokens_elsewhere(sequence))

    def reserve(self, sequence: Sequence) -> tuple[int, BlockTable, int] | None:
        """As `enter`, for its context and one more token, while it is still computed elsewhere."""
        room = self._take_room(sequence, _tokens_elsewhere(sequence))
        self._arriving += room is not None
        return room

    def free_place(self, slot: int, blocks: Seq[int]) -> None:
        """Who was to come does not."""
        self._arriving -= 1
        self._pool.release(blocks)
        self._free_slots.append(slot)

    def settle(self, sequence: Sequence) -> None:
        """It has come, and has the slot and the blocks that were reserved."""
        self._arriving -= 1
        self.line.join(sequence)
        self._entering[sequence.slot] = sequence

    def displaceable(self, wanting: Sequence) -> list[Sequence]:
        """Those that can be made to give way, oldest first; where all are settled, who wants a block itself."""
        return [sequence for sequence in self.line if not settled(sequence)] or [wanting]

    def displace(self, sequence: Sequence) -> bool:
        """Make it give way: what was computed of it is kept in host memory where there is room. Whether it is."""
        self.host.keep(sequence)
        self.vacate(sequence)
        sequence.gave_way += 1
        return bool(sequence.kept)

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
        if not self._entering:
            return ()
        entering, self._entering = self._entering, {}
        return tuple(map(_admission, entering.values()))

    def take_releases(self) -> tuple[int, ...]:
        """Slots that were vacated since the last call, of those that workers know to be taken."""
        leaving, self._leaving = self._leaving, []
        return tuple(leaving)

    def forget_workers(self) -> None:
        """The workers are new: they have no slot taken, and their blocks hold nothing."""
        self._leaving.clear()
        self._pool.forget_all()
        self.host.forget_workers()

    def check(self, tables: Iterable[Seq[int]] = (), slots: Iterable[int] = ()) -> None:
        """Conservation of slots and blocks, with the `tables` and `slots` of those that are not in the line. Raises
        ValueError naming what broke."""
        self.line.check()
        self._pool.check([*(sequence.blocks for sequence in self.line), *tables])
        all_slots = [*(sequence.slot for sequence in self.line), *slots, *self._free_slots]
        if sorted(all_slots) != list(range(self._slots)):
            raise ValueError(f"slots lost or given twice: {sorted(all_slots)}")


def _tokens_here(sequence: Sequence) -> int:
    """For which it is given blocks as it enters."""
    return sequence.final_length if settled(sequence) else sequence.length


def _tokens_elsewhere(sequence: Sequence) -> int:
    """For which it needs blocks where it goes on: its context and one more, or all it may ever have."""
    whole = len(sequence.request.prompt) + sequence.request.max_tokens
    return whole if settled(sequence) else sequence.prefill_target + 1


def _admission(sequence: Sequence) -> Admission:
    """What workers have heard of blocks they know to be computed, up to the last token."""
    request, told = sequence.request, sequence.blocks_sent
    computed = sequence.computed if told else 0
    begun = len(sequence.tokens) > len(request.prompt)
    return Admission(
        sequence.slot,
        tuple(sequence.tokens) if begun else request.prompt,
        len(request.prompt),
        request.sampling,
        computed,
        tuple(sequence.blocks[:told]),
    )
