"""How many sequences each of several schedulers has, side by side: whoever chooses among a thousand asks for all."""

from __future__ import annotations

from scheduler.request import Sequence


class Census:
    """`counts` by a scheduler's place. Rolls keep their own; nobody else writes here."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def new_place(self) -> int:
        self.counts.append(0)
        return len(self.counts) - 1


class Roll(dict[str, Sequence]):
    """The sequences of one scheduler by request, counted in a census. To be changed one at a time."""

    def __init__(self, census: Census) -> None:
        super().__init__()
        self.census, self.place = census, census.new_place()

    def __setitem__(self, request_id: str, sequence: Sequence) -> None:
        super().__setitem__(request_id, sequence)
        self.census.counts[self.place] = len(self)

    def __delitem__(self, request_id: str) -> None:
        super().__delitem__(request_id)
        self.census.counts[self.place] = len(self)
