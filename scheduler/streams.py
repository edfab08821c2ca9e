"""The streams of a group: with one more token for each of them in the same iterations, they go on in step.

What an iteration needs of them, how much they read, who enters a block and who is at its end, is kept for all of them
together, so that nobody has to ask each. An iteration of a group that has a hundred streams touches those that begin or
end, or are at the boundary of a block, and of the others nothing but the list of tokens that grows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple, TypeVar

from scheduler.lockstep import Lockstep
from scheduler.plan import NO_TOKEN
from scheduler.request import Sequence
from scheduler.slo import LONGEST_PROMISE_S, Promise

T = TypeVar("T")
ROUNDING_S = 1e-6
"""Moments that are closer than this may be in either order."""
MOST_DUE_FIRST = 2
"""Among whom the one that is due first is looked for each time; of more, some can be left out for good."""
_order = attrgetter("order")


class Step(NamedTuple):
    """One that was planned: its `number`, and who takes it, who are sampled from the place `first` on of the plan's
    order."""

    number: int
    first: int
    sequences: tuple[Sequence, ...]

    @property
    def end(self) -> int:
        """The place after them."""
        return self.first + len(self.sequences)


class Came(NamedTuple):
    """Tokens of a step, booked but for the gaps: of `sequences`, which had all but `own_gaps` the same one. At the
    places `apart` of the plan's order are those to whom something else happens, untouched."""

    sequences: Seq[Sequence]
    gap_s: float
    own_gaps: Seq[tuple[Sequence, float]]
    apart: Seq[int]


class _Left(NamedTuple):
    """A stream that fell out while steps that it takes were under way: those after `after`, up to `last`."""

    sequence: Sequence
    after: int
    last: int


class Streams(list[Sequence]):
    """Sequences that one more token can be planned for, oldest first. They are at different places, but go on by one
    token each in the same iterations: whoever advances some of them alone takes them apart for that
    (`Running.step_alone`)."""

    __slots__ = (
        "_at", "_beginning", "_due_first", "_ends", "_left", "_lockstep", "_members", "_promises", "_slots",
        "_stops", "_tokens", "block_size", "context",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.context = 0
        """KV positions of all of them."""
        self._lockstep = Lockstep()
        self._tokens: list[list[int]] = []
        """Of each, where they stand."""
        self._beginning: list[Sequence] = []
        """Those that have had no token in step yet."""
        self._ends: dict[int, list[Sequence]] = {}
        """By the step that plans their last token."""
        self._left: list[_Left] = []
        self._at: dict[int, list[Sequence]] = {}
        """By how many tokens its last block would have, if it had not taken the steps; oldest first."""
        self._members: tuple[Sequence, ...] | None = None
        self._slots: list[int] = []
        """Of each."""
        self._promises: Counter[Promise] = Counter()
        self._stops: Counter[int] = Counter()
        self._due_first: list[Sequence] | None = None

    def join(self, sequence: Sequence) -> None:
        if not self:
            self._lockstep.forget_gaps()
        place = self._place(sequence)
        self.insert(place, sequence)
        self._tokens.insert(place, sequence.tokens)
        self._slots.insert(place, sequence.slot)
        self._beginning.append(sequence)
        self._members = None
        self.context += sequence.computed
        insort(self._at.setdefault(self._offset(sequence), []), sequence, key=_order)
        self._ends.setdefault(self._end(sequence), []).append(sequence)
        self._promises[sequence.promise] += 1
        if sequence.stop_token_ids:
            self._stops.update(sequence.stop_token_ids)
        if self._due_first is not None:
            self._due_first.append(sequence)
        sequence.fall_in(self._lockstep)

    def leave(self, sequence: Sequence, place: int) -> None:
        self._fall_out(sequence)
        del self[place], self._tokens[place], self._slots[place]
        if sequence in self._beginning:
            self._beginning.remove(sequence)
        self._members = None
        self.context -= sequence.computed
        _take_from(self._at, self._offset(sequence), sequence)
        _take_from(self._ends, self._end(sequence), sequence)
        _uncount(self._promises, (sequence.promise,))
        if sequence.stop_token_ids:
            _uncount(self._stops, sequence.stop_token_ids)
        if self._due_first is not None and sequence in self._due_first:
            self._due_first = None

    def start_over(self) -> None:
        """Nobody is here."""
        for sequence in self:
            self._fall_out(sequence)
        self.clear()
        for kept in (self._tokens, self._slots, self._beginning, self._ends, self._at, self._promises, self._stops):
            kept.clear()
        self.context, self._members, self._due_first = 0, None, None

    def forget_plans(self) -> None:
        """Nobody will answer those under way, and nobody is here."""
        self._left.clear()
        self._lockstep.came = self._lockstep.planned

    def _fall_out(self, sequence: Sequence) -> None:
        planned, after = self._lockstep.planned, max(self._lockstep.came, sequence.in_step_since)
        if planned > after:
            self._left.append(_Left(sequence, after, planned))
        sequence.fall_out()

    # What an iteration needs of them.

    @property
    def members(self) -> tuple[Sequence, ...]:
        """Those that are here now, whoever comes and goes later."""
        if self._members is None:
            self._members = tuple(self)
        return self._members

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self._slots)

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
        among: list[Sequence] = self if self._due_first is None else self._due_first
        if len(among) > MOST_DUE_FIRST:
            self._due_first = _earliest(among)
        return self if self._due_first is None else self._due_first

    @property
    def entering(self) -> Seq[Sequence]:
        """Those whose next token is the first of a block."""
        return self._at.get(-self._lockstep.planned % self.block_size, ())

    @property
    def filling(self) -> Seq[Sequence]:
        """Those whose next token is the last of a block."""
        return self._at.get((-1 - self._lockstep.planned) % self.block_size, ())

    # A step.

    def step(self, first: int) -> tuple[Step, Seq[Sequence]]:
        """One more token is planned for each, that of the oldest at the place `first` of the plan's order. Those for
        whom it is the last one are told, and are here no more."""
        self._lockstep.planned = number = self._lockstep.planned + 1
        self.context += len(self)
        step, ended = Step(number, first, self.members), self._ends.get(number)
        if ended is None:
            return step, ()
        ended = sorted(ended, key=_order)
        for sequence in ended:
            self.leave(sequence, self._place(sequence))
        return step, ended

    def tokens_came(self, step: Step, tokens: Seq[int], now: float) -> Came:
        """Of a plan with that step in it. Those that stop at theirs, or have none, fall out first: they are `apart`."""
        number, first, members = step
        sequences: Seq[Sequence] = members
        row = tokens if len(tokens) == len(sequences) else tokens[first : first + len(sequences)]
        apart = self._places_apart(step, sequences, row)
        if apart:
            sequences, row = _without(sequences, apart), _without(row, apart)
        lists, begun = self._tokens, self._beginning_with(number) if self._beginning else ()
        if self._beginning:  # they came after it was planned
            lists = _without(lists, sorted([self._place(sequence) for sequence in self._beginning]))
        for of, token in zip(lists, row, strict=True):
            of.append(token)
        own_gaps = self._gaps_of(begun, step, sequences, now) if begun else ()
        gap_s = now - self._lockstep.last_at
        if sequences:
            self._lockstep.tokens_came(number, now)
        else:
            self._lockstep.came = number
        return Came(sequences, gap_s, own_gaps, [first + place for place in apart] if apart else ())

    def _beginning_with(self, number: int) -> list[Sequence]:
        """For whom that step is the first."""
        begun = [sequence for sequence in self._beginning if sequence.in_step_since < number]
        self._beginning = [sequence for sequence in self._beginning if sequence.in_step_since >= number]
        return begun

    def _places_apart(self, step: Step, sequences: Seq[Sequence], row: Seq[int]) -> list[int]:
        places: list[int] = []
        if self._left:
            number = step.number
            left = [gone for gone in self._left if gone.after < number <= gone.last]
            places = [bisect_left(sequences, gone.sequence.order, key=_order) for gone in left]
            self._left = [gone for gone in self._left if gone.last > number]
        if NO_TOKEN in row or (self._stops and not self._stops.keys().isdisjoint(row)):
            for place, (sequence, token) in enumerate(zip(sequences, row, strict=True)):
                if place not in places and (token == NO_TOKEN or token in sequence.stop_token_ids):
                    places.append(place)
                    self.leave(sequence, self._place(sequence))
        return sorted(places) if len(places) > 1 else places

    def _gaps_of(
        self, begun: Seq[Sequence], step: Step, sequences: Seq[Sequence], now: float
    ) -> list[tuple[Sequence, float]]:
        """Of those that had their token before the step by themselves, and not when the others had theirs."""
        if len(begun) == len(sequences):
            self._lockstep.last_at = sequences[0].last_token_at or 0.0
        own = []
        for sequence in begun:
            before = sequence.last_token_at
            if before is not None and before != self._lockstep.last_at:
                own.append((sequence, now - before))
                sequence.had_gap_of_its_own(step.number, now - before)
        return own

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self, sequence.order, key=_order)

    def _offset(self, sequence: Sequence) -> int:
        return (sequence.computed - self._lockstep.planned) % self.block_size

    def _end(self, sequence: Sequence) -> int:
        return self._lockstep.planned + sequence.final_length - 1 - sequence.computed


def _earliest(streams: Seq[Sequence]) -> list[Sequence] | None:
    """Those that are due first, of some with one promise. None where one has no token yet."""
    firsts = [sequence.first_token_at for sequence in streams if sequence.first_token_at is not None]
    if len(firsts) < len(streams):
        return None
    pace = streams[0].promise.tpot_s
    due = [first + (s.computed - s.given) * pace for first, s in zip(firsts, streams, strict=True)]
    at_the_latest = min(due) + ROUNDING_S
    return [sequence for sequence, at in zip(streams, due, strict=True) if at <= at_the_latest]


def _without(those: Seq[T], places: Seq[int]) -> list[T]:
    """`places` in order."""
    left = list(those)
    for place in reversed(places):
        del left[place]
    return left


def _take_from(listed: dict[int, list[Sequence]], at: int, sequence: Sequence) -> None:
    left = [other for other in listed[at] if other is not sequence]
    if left:
        listed[at] = left
    else:
        del listed[at]


def _uncount(counts: Counter[T], of: Seq[T]) -> None:
    for one in of:
        counts[one] -= 1
        if not counts[one]:
            del counts[one]
