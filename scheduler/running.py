"""Those that hold a slot, and of them the prompts and the streams, kept apart as they come, get on and go.

Nearly every iteration has all streams of a group, each with one token more. What it needs of them, how much they read,
who enters a block and who is at its end, is kept for all of them together, so that nobody has to ask each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from operator import attrgetter

from scheduler.budget import Batch
from scheduler.line import Line
from scheduler.request import Sequence
from scheduler.slo import LONGEST_PROMISE_S, Promise

ROUNDING_S = 1e-6
"""Moments that are closer than this may be in either order."""
MOST_DUE_FIRST = 8
_order = attrgetter("order")


class Streams(list[Sequence]):
    """Sequences that one more token can be planned for, oldest first. They are at different places, but go on by one
    token each in the same iterations: whoever advances some of them alone has them sorted out again
    (`Running.sort_out`)."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.context = 0
        """KV positions of all of them."""
        self._steps = 0
        self._lasts = 0
        """Steps after which the first of them may have been planned to its end."""
        self._at: dict[int, list[Sequence]] = {}
        """By how many tokens its last block would have, if it had not taken the steps."""
        self._slots: tuple[int, ...] | None = None
        self._promises: dict[Promise, int] = {}
        self._due_first: list[Sequence] | None = None

    def join(self, sequence: Sequence) -> None:
        left, promise = sequence.final_length - 1 - sequence.computed, sequence.promise
        self._lasts = min(self._lasts, left) if self else left
        insort(self, sequence, key=_order)
        self._slots = None
        self.context += sequence.computed
        self._at.setdefault(self._offset(sequence), []).append(sequence)
        self._promises[promise] = self._promises.get(promise, 0) + 1
        if self._due_first is not None:
            self._due_first.append(sequence)

    def leave(self, sequence: Sequence, place: int) -> None:
        del self[place]
        self._slots = None
        self.context -= sequence.computed
        offset, promise = self._offset(sequence), sequence.promise
        alike = [other for other in self._at[offset] if other is not sequence]
        if alike:
            self._at[offset] = alike
        else:
            del self._at[offset]
        self._promises[promise] -= 1
        if not self._promises[promise]:
            del self._promises[promise]
        if self._due_first is not None and sequence in self._due_first:
            self._due_first = None

    def start_over(self) -> None:
        """Nobody is here."""
        self.clear()
        self.context, self._slots = 0, None
        self._at.clear()
        self._promises.clear()
        self._due_first = None

    @property
    def slots(self) -> tuple[int, ...]:
        if self._slots is None:
            self._slots = tuple([sequence.slot for sequence in self])
        return self._slots

    @property
    def pace_s(self) -> float:
        """Of the tightest; that of the longest promise where there are none."""
        return min([promise.pace_s for promise in self._promises], default=LONGEST_PROMISE_S)

    @property
    def due_first(self) -> Seq[Sequence]:
        """Those among whom is the one whose next token is due first. Where all have one promise it stays the same one
        as they go on, until it leaves or one joins; otherwise it may be any."""
        if len(self._promises) != 1 or next(iter(self._promises)).tbt_s is not None:
            return self
        if self._due_first is None or len(self._due_first) > MOST_DUE_FIRST:
            self._due_first = self._earliest()
        return self if self._due_first is None else self._due_first

    def _earliest(self) -> list[Sequence] | None:
        """None where some have no token yet."""
        firsts = [sequence.first_token_at for sequence in self if sequence.first_token_at is not None]
        if len(firsts) < len(self):
            return None
        pace = self[0].promise.tpot_s
        due = [first + (s.computed - s.given) * pace for first, s in zip(firsts, self, strict=True)]
        at_the_latest = min(due) + ROUNDING_S
        return [sequence for sequence, at in zip(self, due, strict=True) if at <= at_the_latest]

    @property
    def entering(self) -> Seq[Sequence]:
        """Those whose next token is the first of a block."""
        return self._with_offset(0)

    @property
    def filling(self) -> Seq[Sequence]:
        """Those whose next token is the last of a block."""
        return self._with_offset(self.block_size - 1)

    def step(self) -> list[Sequence]:
        """One more token is planned for each. Those for whom it is the last one are told, and are here no more."""
        for sequence in self:
            sequence.computed += 1
            sequence.pending += 1
        self._steps += 1
        self._lasts -= 1
        self.context += len(self)
        if self._lasts > 0 or not self:
            return []
        ended = [sequence for sequence in self if sequence.computed + 1 >= sequence.final_length]
        for sequence in ended:
            self.leave(sequence, self.index(sequence))
        self._lasts = min([s.final_length - 1 - s.computed for s in self], default=0)
        return ended

    def _offset(self, sequence: Sequence) -> int:
        return (sequence.computed - self._steps) % self.block_size

    def _with_offset(self, tokens: int) -> Seq[Sequence]:
        """Whose last block has so many now, oldest first."""
        found = self._at.get((tokens - self._steps) % self.block_size, ())
        return found if len(found) < 2 else sorted(found, key=_order)


class Running(Line):
    """Oldest first: `prompts`, of which tokens are to be computed, `streams`, and those `ending`, whose last token is
    planned and has not come."""

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

    def step(self) -> None:
        """One more token is planned for each of the streams."""
        for sequence in self.streams.step():
            insort(self.ending, sequence, key=_order)

    def got_on(self, prompt: Sequence) -> None:
        """A chunk of it was planned."""
        place = _place(self.prompts, prompt)
        if prompt.computed >= prompt.prefill_target and place is not None:
            del self.prompts[place]
            self._sort_in(prompt)

    def sort_out(self) -> None:
        """Somebody got on otherwise."""
        self.prompts.clear()
        self.ending.clear()
        self.streams.start_over()
        for sequence in self:
            self._sort_in(sequence)

    def check(self) -> None:
        """Raises ValueError where it is not as asking everybody would have it."""
        prompts = [sequence for sequence in self if sequence.prefilling]
        streams = [sequence for sequence in self if sequence.decodable]
        ending = [sequence for sequence in self if not sequence.prefilling and not sequence.decodable]
        kept = [self.prompts, self.streams, self.ending]
        if kept != [prompts, streams, ending] or self.streams.context != sum([s.computed for s in streams]):
            raise ValueError("prompts and streams are not kept as they are")
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
