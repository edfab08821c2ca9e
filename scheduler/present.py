"""Who is there where a newcomer comes, and what its coming does to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from scheduler.request import Sequence
from scheduler.roofline import Features
from scheduler.running import Running
from scheduler.slo import LONGEST_PROMISE_S


class Present(NamedTuple):
    """Who is there where a newcomer comes: the streams as an iteration has them, the pace of the tightest, the prompts
    with when they are due and their tokens left, but for those that yield to any that can be in time, the lengths of
    all that run, and the tokens of all prompts. `owed`: when the first of those who yield is to be
    served at the latest, and their tokens."""

    decodes: Features
    pace_s: float
    prompts: Seq[tuple[float, int]]
    lengths: int
    tokens_to_compute: int
    owed: tuple[float, int] = (math.inf, 0)

    @classmethod
    def of(cls, running: Running, waiting: Seq[Sequence]) -> Present:
        """Asked about many groups for each request: nobody looks at each of their streams for it."""
        computing, ending = running.prompts, running.ending
        streams, contexts, pace = len(running.streams), running.streams.context, running.streams.pace_s
        if ending:
            streams += len(ending)
            contexts += sum([sequence.computed for sequence in ending])
            pace = min([pace, *[sequence.promise.pace_s for sequence in ending]])
        if not computing and not waiting:
            return cls(Features(0, streams, contexts), pace, [], contexts + streams, 0)
        lengths = contexts + streams + sum([sequence.length for sequence in computing])  # of a stream all but the last
        left = [(s, s.length - s.computed) for s in computing] + [(s, s.length - s.reusable) for s in waiting]
        prompts = [(sequence.due, tokens) for sequence, tokens in left if not sequence.yields]
        owing = [(owed_at(s), tokens) for s, tokens in left if s.yields] if len(prompts) < len(left) else []
        owed = min([at for at, _ in owing], default=math.inf), sum([tokens for _, tokens in owing])
        return cls(Features(0, streams, contexts), pace, prompts, lengths, sum([tokens for _, tokens in left]), owed)

    def joined_by(self, newcomer: Sequence) -> Present:
        """With one prompt more."""
        own = newcomer.length - newcomer.reusable
        return self._replace(
            prompts=[*self.prompts, (newcomer.due, own)],
            lengths=self.lengths + newcomer.length,
            tokens_to_compute=self.tokens_to_compute + own,
        )

    def generating(self, prompts: Seq[Sequence]) -> Present:
        """Once these prompts, and no others, have become streams."""
        streams = self.decodes.decodes + len(prompts)
        contexts = self.decodes.decode_context + sum([sequence.length for sequence in prompts])
        pace = min([self.pace_s, *[sequence.promise.pace_s for sequence in prompts]])
        return Present(Features(0, streams, contexts), pace, (), contexts + streams, 0)

    def ahead_of(self, due: float) -> int:
        """Tokens of prompts that go before one that is due then."""
        return sum([left for at, left in self.prompts if at <= due])

    def is_due_after(self, due: float) -> bool:
        """Whether any prompt is."""
        return any(at > due for at, _ in self.prompts)

    def harmed_by(self, newcomer: Sequence, begins_at: float, token_s: float, beside_s: float) -> bool:
        """Whether a prompt that is due after a newcomer would be late for it, and in time without it; or those that are
        late already would not be served within twice the time that they were promised.

        The first of all gets on at `begins_at`. A prompt token takes `token_s`, and beside the newcomer as a stream
        `beside_s`.
        """
        own = newcomer.length - newcomer.reusable
        without, beside = begins_at, 0.0
        for due, tokens in sorted(self.prompts):
            without += tokens * token_s
            if due > newcomer.due:
                beside += tokens * (beside_s - token_s)
                if without <= due < without + own * token_s + beside:
                    return True
        latest, owed = self.owed
        return without + own * token_s + beside + owed * beside_s > latest


NOBODY = Present(Features(), LONGEST_PROMISE_S, (), 0, 0)


class Queue(NamedTuple):
    """What a newcomer finds: sequences that hold a slot, those that wait for one, what is free, of so many blocks, and
    how many of its tokens have KV already."""

    present: Present
    running: Seq[Sequence]
    waiting: Seq[Sequence]
    free_slots: int
    free_blocks: int
    blocks_for: Callable[[int], int]
    blocks: int
    cached_tokens: int = 0
    elsewhere: Seq[Sequence] | None = None
    """The streams of the group that will generate, where that is another one: here are prompts alone then."""

    @property
    def slots(self) -> int:
        return self.free_slots + len(self.running)

    def emptied(self) -> Queue:
        """If nobody were there."""
        elsewhere: Seq[Sequence] | None = None if self.elsewhere is None else ()
        return Queue(NOBODY, (), (), self.slots, self.blocks, self.blocks_for, self.blocks, 0, elsewhere)

    def joined_by(self, newcomer: Sequence) -> Queue:
        """With one prompt more, that has a slot where one is free."""
        present = self.present.joined_by(newcomer)
        if self.free_slots <= 0:
            return self._replace(present=present, waiting=[*self.waiting, newcomer])
        return self._replace(
            present=present,
            running=[*self.running, newcomer],
            free_slots=self.free_slots - 1,
            free_blocks=self.free_blocks - self.blocks_for(newcomer.length),
        )

    def generating(self) -> Queue:
        """Once every prompt that has a slot, or would be given one, has become a stream."""
        entering = self.waiting[: max(0, self.free_slots)]
        there = (*self.running, *entering)
        prompts = [s for s in there if is_prompt(s) and s.goes_on]
        if self.elsewhere is not None:
            return self.emptied()._replace(elsewhere=[*self.elsewhere, *prompts])
        running = [s for s in there if s.goes_on or not is_prompt(s)]
        return self._replace(
            present=self.present.generating(prompts),
            running=running,
            waiting=(),
            free_slots=self.slots - len(running),
            free_blocks=self.free_blocks - sum([self.blocks_for(s.length) for s in entering]),
        )


def is_prompt(sequence: Sequence) -> bool:
    """Whether it is to be computed, with a slot or without, before anything is generated for it."""
    return sequence.prefill_target == 0 or sequence.computed < sequence.prefill_target


def owed_at(late: Sequence) -> float:
    """When a prompt that cannot be in time is to be served, so that newcomers are no reason for it to wait for ever."""
    return late.arrival + 2 * late.promise.ttft_s
