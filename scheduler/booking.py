"""From a forward that was granted to what the workers are told of it: its tokens are booked as computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler.plan import Forward, Segment
from scheduler.policies import Draft, Mix
from scheduler.prefixes import Written
from scheduler.request import Phase, Sequence
from scheduler.running import Running
from scheduler.scoring import Scored, gives_scores
from scheduler.streams import Step, Streams


@dataclass(slots=True)
class Booking:
    """What is noted of the forwards of a plan: who is sampled from, in the order of the plan, which blocks get full,
    which chunks give log-probabilities of their prompt, and steps that all streams take."""

    sampling: tuple[Sequence, ...] = ()
    written: list[Written] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def book_forward(mix: Mix, running: Running, booking: Booking) -> Forward:
    """The workers' side of a forward."""
    block_size, streams = running.streams.block_size, mix.decodes
    new_blocks: list[tuple[int, int]] = []
    for sequence in entering_a_block(streams, block_size):
        unsent = _unsent_blocks(sequence, sequence.computed // block_size + 1)
        new_blocks += [(sequence.slot, block) for block in unsent]
    filling = _filling_a_block(streams, block_size)
    first = len(booking.sampling)
    if isinstance(streams, Streams):
        members, slots = streams.members, streams.slots
    else:
        members, slots = tuple(streams), tuple([sequence.slot for sequence in streams])
    booking.sampling += members
    if streams and streams is running.streams:
        booking.steps.append(running.step(first))
    elif streams:
        running.step_alone(streams)
    for sequence in filling:
        end = sequence.computed
        booking.written.append(Written(sequence, sequence.preemptions, end - 1, end))
    if not mix.chunks:
        return Forward(slots, (), tuple(new_blocks))
    chunks = tuple([_book_chunk(draft, block_size, booking) for draft in mix.chunks])
    for draft in mix.chunks:
        running.got_on(draft.sequence)
    return Forward(slots, chunks, tuple(new_blocks))


def entering_a_block(streams: Seq[Sequence], block_size: int) -> Seq[Sequence]:
    """Those whose next token is the first of a block. The others need none, and nobody has to think of them."""
    if isinstance(streams, Streams):
        return streams.entering
    return [sequence for sequence in streams if sequence.computed % block_size == 0]


def _filling_a_block(streams: Seq[Sequence], block_size: int) -> Seq[Sequence]:
    """Those whose next token is the last of a block."""
    if isinstance(streams, Streams):
        return streams.filling
    return [sequence for sequence in streams if (sequence.computed + 1) % block_size == 0]


def still_running(mix: Mix) -> Mix:
    """What is left of a forward after sequences gave way."""
    return Mix(
        [sequence for sequence in mix.decodes if sequence.phase is Phase.RUNNING],
        [draft for draft in mix.chunks if draft.sequence.phase is Phase.RUNNING],
    )


def _book_chunk(draft: Draft, block_size: int, booking: Booking) -> Segment:
    """Its blocks are told as far as it writes: those after may still turn out to be another's."""
    sequence, start = draft.sequence, draft.sequence.computed
    sequence.computed = end = start + draft.count
    if end // block_size > start // block_size:
        booking.written.append(Written(sequence, sequence.preemptions, start, end))
    sample = end == sequence.length
    if sample:
        sequence.pending += 1
        booking.sampling += (sequence,)
    score = gives_scores(sequence, start, end)
    if score:
        booking.scored.append(Scored(sequence, start))
    new_blocks = tuple(_unsent_blocks(sequence, -(-end // block_size)))
    return Segment(sequence.slot, start, draft.count, new_blocks, sample, score)


def _unsent_blocks(sequence: Sequence, needed: int) -> list[int]:
    """Of its first `needed` blocks those that the workers have not heard of; after this they have."""
    unsent = sequence.blocks[sequence.blocks_sent : needed]
    sequence.blocks_sent = max(sequence.blocks_sent, needed)
    return unsent
