"""From a forward that was granted to what the workers are told of it: its tokens are booked as computed."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.plan import Forward, Segment
from scheduler.policies import Draft, Mix
from scheduler.prefixes import Written
from scheduler.request import Phase, Sequence
from scheduler.scoring import Scored, gives_scores


def book_forward(
    mix: Mix, block_size: int, sampling: list[Sequence], written: list[Written], scored: list[Scored]
) -> Forward:
    """The workers' side of a forward. Who is sampled from is added to `sampling`, in the order of the plan, blocks that
    get full to `written`, and chunks that give log-probabilities of their prompt to `scored`."""
    new_blocks: list[tuple[int, int]] = []
    for sequence in mix.decodes:
        computed = sequence.computed
        if not computed % block_size:
            unsent = _unsent_blocks(sequence, computed // block_size + 1)
            new_blocks += [(sequence.slot, block) for block in unsent]
        sequence.computed = computed = computed + 1
        sequence.pending += 1
        if not computed % block_size:
            written.append(Written(sequence, sequence.preemptions, computed - 1, computed))
    sampling.extend(mix.decodes)
    return Forward(
        decodes=tuple([sequence.slot for sequence in mix.decodes]),
        chunks=tuple([_book_chunk(draft, block_size, sampling, written, scored) for draft in mix.chunks]),
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


def _book_chunk(
    draft: Draft, block_size: int, sampling: list[Sequence], written: list[Written], scored: list[Scored]
) -> Segment:
    """Its blocks are told as far as it writes: those after may still turn out to be another's."""
    sequence, start = draft.sequence, draft.sequence.computed
    sequence.computed += draft.count
    if sequence.computed // block_size > start // block_size:
        written.append(Written(sequence, sequence.preemptions, start, sequence.computed))
    sample = sequence.computed == sequence.length
    if sample:
        sequence.pending += 1
        sampling.append(sequence)
    score = gives_scores(sequence, start, sequence.computed)
    if score:
        scored.append(Scored(sequence, start))
    new_blocks = tuple(_unsent_blocks(sequence, -(-sequence.computed // block_size)))
    return Segment(sequence.slot, start, draft.count, new_blocks, sample, score)


def _unsent_blocks(sequence: Sequence, needed: int) -> list[int]:
    """Of its first `needed` blocks those that the workers have not heard of; after this they have."""
    unsent = sequence.blocks[sequence.blocks_sent : needed]
    sequence.blocks_sent = max(sequence.blocks_sent, needed)
    return unsent
