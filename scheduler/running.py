"""Those that hold a slot, and of them the prompts and the streams, kept apart as they come, get on and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from operator import attrgetter

from scheduler.budget import Batch
from scheduler.line import Line
from scheduler.request import Sequence
from scheduler.streams import Step, Streams

_order = attrgetter("order")


class Running(Line):
    """Oldest first: `prompts`, of which tokens are to be computed, `streams`, and those `ending`, whose last token is
    planned and has not come."""

    __slots__ = ("ending", "prompts", "streams")

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.prompts: list[Sequence] = []
        self.streams = Streams(block_size)
        self.ending: list[Sequence] = []

    def join(self, sequence: Sequence) -> None:
        super().join(sequence)
        self._sort_in(sequence)

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        if (place := _place(self.streams, sequence)) is not None:
            self.streams.leave(sequence, place)
            return
        for those in (self.prompts, self.ending):
            if (place := _place(those, sequence)) is not None:
                del those[place]

    def batch(self, now: float) -> Batch:
        """Those that want something."""
        return Batch(list(self.prompts), self.streams, now)

    def step(self, first: int) -> Step:
        """One more token is planned for each of the streams, from the place `first` of the plan's order on."""
        step, ended = self.streams.step(first)
        for sequence in ended:
            insort(self.ending, sequence, key=_order)
        return step

    def step_alone(self, some: Seq[Sequence]) -> None:
        """One more token is planned for each of some streams, and none for the others."""
        self.prompts.clear()
        self.ending.clear()
        self.streams.start_over()
        for sequence in some:
            sequence.computed += 1
            sequence.pending += 1
        for sequence in self:
            self._sort_in(sequence)

    def got_on(self, prompt: Sequence) -> None:
        """A chunk of it was planned."""
        if prompt.computed < prompt.prefill_target:
            return
        if (place := _place(self.prompts, prompt)) is not None:
            del self.prompts[place]
            self._sort_in(prompt)

    def check(self) -> None:
        """Raises ValueError where it is not as asking everybody would have it."""
        prompts = [sequence for sequence in self if sequence.prefilling]
        streams = [sequence for sequence in self if sequence.decodable]
        ending = [sequence for sequence in self if not sequence.prefilling and not sequence.decodable]
        kept = [self.prompts, self.streams, self.ending]
        if kept != [prompts, streams, ending] or self.streams.context != sum([s.computed for s in streams]):
            raise ValueError("prompts and streams are not kept as they are")
        if any(stream.length != stream.computed + 1 for stream in streams):
            raise ValueError("of a stream other tokens than the last one have no KV")
        due_first, due = ([s.next_token_due() for s in those] for those in (self.streams.due_first, self.streams))
        if min(due_first, default=0.0) != min(due, default=0.0):
            raise ValueError("another stream is due first")

    def _sort_in(self, sequence: Sequence) -> None:
        """As a sequence's properties `prefilling` and `decodable` have it."""
        if sequence.computed < sequence.prefill_target:
            insort(self.prompts, sequence, key=_order)
        elif sequence.computed + 1 < sequence.final_length:  # all of its tokens but the last have KV
            self.streams.join(sequence)
        else:
            insort(self.ending, sequence, key=_order)


def _place(those: Seq[Sequence], sequence: Sequence) -> int | None:
    """Where it is among those, oldest first; None where it is not."""
    place = bisect_left(those, sequence.order, key=_order)
    return place if place < len(those) and those[place] is sequence else None
