"""How a dimension is divided among ranks. No torch: a process that only gives orders to ranks needs none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's contiguous part of a dimension: [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Part:
        """The same part of a dimension that has `factor` entries for each of this one's."""
        return Part(self.start * factor, self.stop * factor)


def split(count: int, ranks: int) -> list[Part]:
    """Contiguous parts of `count` entries, as even as they get, the larger ones first: 3 among 2 is 2 + 1.

    Raises ValueError where a rank would get nothing.
    """
    if count < ranks:
        raise ValueError(f"{count} cannot be divided among {ranks} ranks")
    base, extra = divmod(count, ranks)
    sizes = [base + (rank < extra) for rank in range(ranks)]
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    return [Part(start, start + size) for start, size in zip(starts, sizes, strict=True)]
