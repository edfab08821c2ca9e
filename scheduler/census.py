"""How many sequences each of several schedulers has, side by side: whoever chooses among a thousand asks for all."""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduler.request import Sequence


class Census:
    """By a scheduler's place. Rolls keep their own; nobody else writes here."""

    def __init__(self) -> None:
        self._places = 0
        self._with: dict[int, list[int]] = {}
        """The places with so many sequences, in their order."""

    def new_place(self) -> int:
        place, self._places = self._places, self._places + 1
        insort(self._with.setdefault(0, []), place)
        return place

    def changed(self, place: int, before: int, after: int) -> None:
        """So many sequences are there."""
        alike = self._with[before]
        del alike[bisect_left(alike, place)]
        if not alike:
            del self._with[before]
        insort(self._with.setdefault(after, []), place)

    def emptiest(self, count: int, first: int) -> list[int]:
        """Of the `first` places those with the fewest sequences, the first of equal ones."""
        found: list[int] = []
        for sequences in sorted(self._with):
            places = self._with[sequences]
            found += places[: min(count - len(found), bisect_left(places, first))]
            if len(found) == count:
                break
        return found


class Roll(dict[str, Sequence]):
    """The sequences of one scheduler by request, counted in a census. To be changed one at a time."""

    __slots__ = ("census", "place")

    def __init__(self, census: Census) -> None:
        super().__init__()
        self.census, self.place = census, census.new_place()

    def __setitem__(self, request_id: str, sequence: Sequence) -> None:
        before = len(self)
        super().__setitem__(request_id, sequence)
        self._count(before)

    def __delitem__(self, request_id: str) -> None:
        before = len(self)
        super().__delitem__(request_id)
        self._count(before)

    def _count(self, before: int) -> None:
        if len(self) != before:
            self.census.changed(self.place, before, len(self))
