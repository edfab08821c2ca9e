"""Which group takes a request: the one with the smallest predicted time to its first token.

What a group holds of the prompt already makes its prediction smaller, so that requests that begin alike go where their
beginning is, until the wait there costs more than computing it again elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cluster.loop import IterationLoop
from scheduler.admission import check_tokens
from scheduler.request import Request
from scheduler.request import Sequence as Sequence_
from scheduler.scheduler import Scheduler

FORECASTS = 8
"""A prediction walks through a group's queue: of many groups it is made for those with the fewest sequences."""
HOLDERS = 2
"""And for those that hold the most of the prompt."""


def takers(loops: Sequence[IterationLoop]) -> list[IterationLoop]:
    """Those that may be given requests: with workers, or where none has them, those that wait for new ones. None where
    no request could get to its end."""
    roles = {loop.scheduler.exchange.role for loop in loops}
    standing = [loop for loop in loops if loop.failure is None]
    if {loop.scheduler.exchange.role for loop in standing} != roles:
        return []
    taking = [loop for loop in standing if loop.scheduler.exchange.role != "decode"]
    return [loop for loop in taking if loop.lost is None] or taking


def choose(loops: Sequence[IterationLoop], request: Request, now: float) -> IterationLoop:
    """Of several equal ones the first. Raises RequestRefused for a class of service, or a token, that is not known."""
    return loops[Groups([loop.scheduler for loop in loops]).choose(request, now)]


def choose_again(sequence: Sequence_, groups: Mapping[int, Scheduler], now: float) -> int:
    """The same for a sequence that starts over."""
    if len(groups) == 1:
        return next(iter(groups))
    numbers = sorted(groups)
    return numbers[Groups([groups[number] for number in numbers]).best(sequence, now)]


class Groups:
    """Schedulers that a request may go to. With a thousand of them, what is asked of each has to be little."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        rolls = [scheduler.sequences for scheduler in schedulers]
        self._rolls = rolls
        side_by_side = all(roll.census is rolls[0].census and roll.place == at for at, roll in enumerate(rolls))
        self._census = rolls[0].census if side_by_side else None

    def choose(self, request: Request, now: float) -> int:
        """As `best`. Raises RequestRefused for a class of service, or a token, that is not known."""
        if len(self._schedulers) == 1:
            return 0
        check_tokens(request, self._schedulers[0].config.limits)  # what has no digest cannot be looked for
        return self.best(self._schedulers[0].intake.newcomer(request, now), now)

    def best(self, newcomer: Sequence_, now: float) -> int:
        """Of several equal ones the first."""
        return min(self._promising(newcomer), key=lambda index: _rank(self._schedulers[index], newcomer, now))

    def _promising(self, newcomer: Sequence_) -> list[int]:
        """In their order."""
        everybody = range(len(self._schedulers))
        if len(everybody) <= FORECASTS + HOLDERS:
            return list(everybody)
        return sorted({*self._emptiest(FORECASTS), *self._holders(newcomer)})

    def _emptiest(self, count: int) -> list[int]:
        """Those with the fewest sequences, the first of equal ones."""
        if self._census is not None:
            return self._census.emptiest(count, len(self._rolls))
        return sorted(range(len(self._rolls)), key=lambda index: len(self._rolls[index]))[:count]

    def _holders(self, newcomer: Sequence_) -> list[int]:
        """Those that hold the most of the prompt, from its first block on, the first of equal ones."""
        first, most = self._schedulers[0], list[int]()
        holding: list[int] | None = None
        for digest in first.prefixes.digests(newcomer):
            pools = set(first.pool.directory.holders(digest))
            if not pools:
                break
            if holding is None:
                holding = [index for index, scheduler in enumerate(self._schedulers) if scheduler.pool in pools]
            else:
                holding = [index for index in holding if self._schedulers[index].pool in pools]
            most = [*holding[:HOLDERS], *(index for index in most if index not in holding[:HOLDERS])][:HOLDERS]
        return most


def _rank(scheduler: Scheduler, newcomer: Sequence_, now: float) -> tuple[float, int, int]:
    """Less is better. Predictions that differ by less than a millisecond do not differ."""
    expected = scheduler.intake.expected(newcomer, now)
    seconds, tokens, sequences = expected
    return 0 if seconds is None else math.floor(seconds * 1e3), tokens, sequences
