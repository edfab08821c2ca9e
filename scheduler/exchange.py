"""What a scheduler hands to another one and takes from it: sequences whose prompt is computed here and whose tokens are
generated there, and those that have to start over elsewhere.

A sequence is at every moment in exactly one scheduler. One that is HELD here has no slot: on a group that prefills, it
keeps its blocks until another group has their content; on a group that decodes, it gave its blocks up and waits to be
computed again (one whose KV is kept in host memory waits for blocks instead). Blocks that workers may still read or
write for a transfer are leased: they stay referenced until the workers have said that they are done, whatever becomes
of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from scheduler.blocks import BlockPool, BlockTable
from scheduler.line import Line
from scheduler.prefixes import Prefixes, Written
from scheduler.request import Phase, Sequence
from scheduler.residents import Residents

Role = Literal["both", "prefill", "decode"]
MOST_HELD = 0.5
"""Of a prefill group's blocks, what prompts may hold that no decode group has room for: then no new ones begin."""


@dataclass(slots=True, eq=False)
class Place:
    """Room for a sequence that is still computed elsewhere: a slot, and blocks for its context and one token more. The
    first `shared` of its blocks hold already what it begins with; `life` are its preemptions at that time. Plans up to
    `last_use` may still write to its blocks, or copy what they held."""

    sequence: Sequence
    life: int
    slot: int
    blocks: BlockTable
    shared: int
    last_use: int
    given_up: bool = False


class Exchange:
    """Of one scheduler, whose sequences, lines and pool it works on."""

    __slots__ = (
        "_last_use", "_leases", "_places", "_pool", "_prefixes", "_residents", "_sequences", "_waiting",
        "held", "placed", "role",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        sequences: dict[str, Sequence],
        waiting: Line,
        residents: Residents,
        pool: BlockPool,
        prefixes: Prefixes,
    ) -> None:
        self.role = role
        self.held = Line()
        self.placed: set[str] = set()
        """Requests here for which another group has a place."""
        self._sequences = sequences
        self._waiting = waiting
        self._residents = residents
        self._pool = pool
        self._prefixes = prefixes
        self._places: set[Place] = set()
        self._leases: dict[int, tuple[int, ...]] = {}
        self._last_use: dict[int, int] = {}

    # Going out.

    def bound(self, sequence: Sequence) -> None:
        """Where only prompts are computed, none of its tokens but the next one is planned for."""
        if self.role == "prefill":
            sequence.final_length = len(sequence.tokens) + 1

    def unbound(self, sequence: Sequence) -> bool:
        """Before a token of it is booked: it may have as many as were asked for. Whether another group goes on then."""
        if self.role == "prefill":
            sequence.final_length = len(sequence.request.prompt) + sequence.request.max_tokens
        return self.role == "prefill"

    @property
    def takes_prompts(self) -> bool:
        """False where too many already wait for room in another group: then those alone enter that need none."""
        if self.role != "prefill":
            return True
        unplaced = [
            sequence
            for sequence in (*self._residents.line, *self.held)
            if sequence.request_id not in self.placed and sequence.goes_on
        ]
        return not unplaced or sum(len(s.blocks) for s in unplaced) < MOST_HELD * self._pool.total

    def hold(self, sequence: Sequence) -> None:
        """It has its first token: it gives its slot away and keeps its blocks, for another group to take it over."""
        blocks, sequence.blocks = sequence.blocks, BlockTable()
        computed = sequence.computed
        self._residents.vacate(sequence)
        sequence.blocks, sequence.computed, sequence.prefill_target = blocks, computed, computed
        sequence.phase = Phase.HELD
        self.held.join(sequence)

    def gives_back(self, sequence: Sequence) -> bool:
        """Whether a sequence that was preempted goes on elsewhere; what only ever was here stays."""
        return self.role == "decode" and sequence.first_token_at is not None

    def give_back(self, sequence: Sequence) -> None:
        """It was preempted on a group that does not compute prompts: another has to compute it again."""
        sequence.phase = Phase.HELD
        self.held.join(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A held sequence leaves, and what it held is free."""
        self.held.leave(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = BlockTable()
        sequence.blocks_sent = sequence.known_blocks = sequence.computed = sequence.prefill_target = 0

    def hand_over(self, sequence: Sequence) -> None:
        """A held or waiting sequence is another scheduler's from now on, which has nothing of its KV."""
        self._residents.host.forget(sequence)
        if sequence.phase is Phase.HELD:
            self.drop(sequence)
        else:
            self._waiting.leave(sequence)
        self.placed.discard(sequence.request_id)
        del self._sequences[sequence.request_id]

    def leaves(self, sequence: Sequence, plan: int) -> None:
        """Its blocks are about to be free, though plans up to this one may use them. That is for whoever writes to
        them beside the plans."""
        if self.role == "decode":
            self._last_use.update(dict.fromkeys(sequence.blocks, plan))

    # Coming in.

    def adopt(self, sequence: Sequence) -> None:
        """A sequence that another scheduler handed over, to be computed from its tokens."""
        self._sequences[sequence.request_id] = sequence
        sequence.phase = Phase.WAITING
        self.bound(sequence)
        self._waiting.join(sequence)

    def reserve(self, sequence: Sequence) -> Place | None:
        """Room for a sequence that another group computes, or None where there is none now."""
        room = self._residents.reserve(sequence)
        if room is None:
            return None
        slot, blocks, shared = room
        last_use = max((self._last_use.pop(block, 0) for block in blocks), default=0)
        place = Place(sequence, sequence.preemptions, slot, blocks, shared, last_use)
        self._places.add(place)
        return place

    def could_reserve(self, sequence: Sequence) -> int | None:
        """Blocks that would be left available; None where there is no room now, or an older one waits for it here."""
        if not self._residents.host.told or (self._waiting and self._waiting[0].order < sequence.order):
            return None
        return self._residents.room_for(sequence)

    def give_up(self, place: Place) -> None:
        """The slot is free at once, and the blocks once no lease is on them."""
        if place in self._places:
            place.given_up = True
            self._places.remove(place)
            self._residents.free_place(place.slot, place.blocks)

    def settle(self, place: Place) -> None:
        """The KV of all its tokens but the last has come: it runs here."""
        sequence = place.sequence
        self._places.remove(place)
        self._sequences[sequence.request_id] = sequence
        sequence.blocks, sequence.slot = place.blocks, place.slot
        sequence.blocks_sent, sequence.known_blocks = len(place.blocks), place.shared
        sequence.computed = sequence.prefill_target = len(sequence.tokens) - 1
        sequence.final_length = len(sequence.request.prompt) + sequence.request.max_tokens
        sequence.phase = Phase.RUNNING
        self._residents.settle(sequence)
        self._prefixes.learn([Written(sequence, sequence.preemptions, 0, sequence.computed)], [])

    @property
    def arriving(self) -> int:
        return len(self._places)

    def figures(self) -> dict[str, int | str]:
        """Of sequences on their way; nothing where none travel."""
        if self.role == "both":
            return {}
        return {"role": self.role, "held": len(self.held), "arriving": self.arriving, "blocks_leased": self.leased}

    # Leases.

    def lease(self, number: int, blocks: Seq[int]) -> None:
        """Workers are about to read or write these blocks under that number. Raises ValueError for one in use."""
        if number in self._leases:
            raise ValueError(f"lease {number} is given twice")
        self._pool.hold(blocks)
        self._leases[number] = tuple(blocks)

    def end_lease(self, number: int) -> None:
        """The workers do not touch its blocks any more. One that has ended already is no error."""
        blocks = self._leases.pop(number, None)
        if blocks is not None:
            self._pool.release(blocks)

    @property
    def leased(self) -> int:
        """Blocks under a lease."""
        return len({block for blocks in self._leases.values() for block in blocks})

    def forget_workers(self) -> None:
        """The workers are gone: they touch nothing any more, and nothing arrives."""
        self._last_use.clear()
        for number in list(self._leases):
            self.end_lease(number)
        for place in list(self._places):
            self.give_up(place)

    # Conservation.

    @property
    def tables(self) -> list[Seq[int]]:
        """Blocks that are held by others than running sequences."""
        return [*(s.blocks for s in self.held), *(p.blocks for p in self._places), *self._leases.values()]

    @property
    def slots(self) -> list[int]:
        return [place.slot for place in self._places]
