"""Sequences in the order in which they came, and tenants that take turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from scheduler.deadlines import Deadlines
from scheduler.request import Sequence


class Line(list[Sequence]):
    """Oldest first. `join` and `leave` find the place by bisection: when a thousand requests end at once, none of them
    is looked for from the start."""

    __slots__ = ("_joined_with", "changes", "let_in", "tokens")

    key: Callable[[Sequence], Any] = staticmethod(attrgetter("order"))

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        """How often somebody joined or left."""
        self.tokens = 0
        """Of all in the line, as many as each had when it joined."""
        self.let_in = 0
        """Tokens of all that have left to be served."""
        self._joined_with: dict[int, int] = {}

    def join(self, sequence: Sequence) -> None:
        """Take its place in the line, which is the last one but for those that come back after a preemption."""
        self.changes += 1
        self._joined_with[sequence.order] = len(sequence.tokens)
        self.tokens += len(sequence.tokens)
        if not self or self.key(self[-1]) < self.key(sequence):
            self.append(sequence)
        else:
            insort(self, sequence, key=self.key)

    def leave(self, sequence: Sequence) -> None:
        """Raises ValueError for one that is not in the line."""
        place = bisect_left(self, self.key(sequence), key=self.key)
        if place == len(self) or self[place] is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not in this line")
        del self[place]
        self.changes += 1
        self.tokens -= self._joined_with.pop(sequence.order)

    def first(self) -> Sequence | None:
        """Whose turn it is, where everybody is served as they came."""
        return self[0] if self else None

    def enter(self, sequence: Sequence) -> None:
        """It leaves to be served."""
        self.let_in += len(sequence.tokens)
        self.leave(sequence)

    def in_turn(self) -> Iterator[Sequence]:
        """In the order in which they would be served as they came."""
        return iter(self)


class Tenant:
    """Those of one tenant that wait: in their order, and by when they are due. `turn` is where it goes on."""

    __slots__ = ("deadlines", "line", "turn")

    def __init__(self, turn: float) -> None:
        self.turn = turn
        self.line = Line()
        self.deadlines = Deadlines()

    @property
    def weight(self) -> float:
        return self.line[0].request.weight

    def turn_of(self, sequence: Sequence) -> float:
        """Whoever comes back after a preemption has the turn that it had."""
        return self.turn if sequence.turn is None else sequence.turn


class FairLine(Line):
    """Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) over tenants, with tokens as the length of a request.

    A tenant's turn is where the one before it ends, or the turn of the last that entered from here, whichever is later;
    it ends the tokens of who enters (prompt and `max_tokens`), divided by its weight, after that. The earliest turn is
    first. So a tenant that floods waits for itself, and one that comes back after a pause has saved nothing up. Which
    of a tenant's requests takes its turn is another's to decide: as they came, or by when they are due.
    """

    __slots__ = ("_ends", "_now", "tenants")

    def __init__(self) -> None:
        super().__init__()
        self.tenants: dict[str, Tenant] = {}
        """Those that have somebody waiting."""
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def join(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(max(self._now, self._ends.get(name, 0.0)))
        tenant.line.join(sequence)
        tenant.deadlines.join(sequence)
        super().join(sequence)
        if tenant.line[0] is sequence:
            tenant.deadlines.passed_from = self.let_in

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        name = sequence.request.tenant
        tenant = self.tenants[name]
        oldest = tenant.line[0]
        tenant.line.leave(sequence)
        tenant.deadlines.leave(sequence)
        if not tenant.line:
            del self.tenants[name]
        elif oldest is sequence:
            tenant.deadlines.passed_from = self.let_in
        if not self:
            self._now = max((self._now, *self._ends.values()))
            self._ends.clear()

    def enter(self, sequence: Sequence) -> None:
        """It leaves to be served, and its tenant has had its turn."""
        name = sequence.request.tenant
        if sequence.turn is None:
            tenant = self.tenants[name]
            sequence.turn = tenant.turn
            self._now = max(self._now, tenant.turn)
            tenant.turn = self._ends[name] = tenant.turn + sequence.final_length / sequence.request.weight
        super().enter(sequence)

    def first(self) -> Sequence | None:
        if len(self.tenants) < 2:
            return self[0] if self else None
        heads = [(tenant.turn_of(tenant.line[0]), tenant.line[0].order) for tenant in self.tenants.values()]
        order = min(heads)[1]
        return self[bisect_left(self, order, key=self.key)]

    def in_turn(self) -> Iterator[Sequence]:
        turns = {name: tenant.turn for name, tenant in self.tenants.items()}
        lines = {name: iter(tenant.line) for name, tenant in self.tenants.items()}
        heads = {name: next(line) for name, line in lines.items()}

        def turn(name: str) -> tuple[float, int]:
            had = heads[name].turn
            return turns[name] if had is None else had, heads[name].order

        while heads:
            name = min(heads, key=turn)
            sequence = heads.pop(name)
            if sequence.turn is None:
                turns[name] += sequence.final_length / sequence.request.weight
            yield sequence
            if (following := next(lines[name], None)) is not None:
                heads[name] = following
