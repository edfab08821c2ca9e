"""From a forward that was granted to what the workers are told of it: its tokens are booked as computed."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.plan import Forward, Segment
from scheduler.policies import Draft, Mix
from scheduler.request import Phase, Sequence


def book_forward(mix: Mix, block_size: int, sampling: list[Sequence]) -> Forward:
    """The workers' side of a forward. Who is sampled from is added to `sampling`, in the order of the plan."""
    new_blocks = [(s.slot, block) for s in entering_a_block(mix.decodes, block_size) for block in _unsent_blocks(s)]
    for sequence in mix.decodes:
        sequence.computed += 1
        sequence.pending += 1
    sampling.extend(mix.decodes)
    return Forward(
        decodes=tuple([sequence.slot for sequence in mix.decodes]),
        chunks=tuple(_book_chunk(draft, sampling) for draft in mix.chunks),
        new_blocks=tuple(new_blocks),
    )


def entering_a_block(decodes: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Those whose next token is the first of a block. The others need none, and nobody has to think of them."""
    return [sequence for sequence in decodes if sequence.computed % block_size == 0]


def still_running(mix: Mix) -> Mix:
    """What is left of a forward after sequences gave way."""
    return Mix(
        [sequence for sequence in mix.decodes if sequence.phase is Phase.RUNNING],
        [draft for draft in mix.chunks if draft.sequence.phase is Phase.RUNNING],
    )


def _book_chunk(draft: Draft, sampling: list[Sequence]) -> Segment:
    sequence, start = draft.sequence, draft.sequence.computed
    sequence.computed += draft.count
    sample = sequence.computed == sequence.length
    if sample:
        sequence.pending += 1
        sampling.append(sequence)
    return Segment(sequence.slot, start, draft.count, tuple(_unsent_blocks(sequence)), sample)


def _unsent_blocks(sequence: Sequence) -> list[int]:
    """Blocks that the workers have not heard of; after this they have."""
    unsent = sequence.blocks[sequence.blocks_sent :]
    sequence.blocks_sent = len(sequence.blocks)
    return unsent
