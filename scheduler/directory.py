"""Which of several pools know a block: asked about a prompt, before it is known whose it will be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.blocks import BlockPool


class Directory:
    """By digest. Pools keep their own entries; nobody else writes here."""

    def __init__(self) -> None:
        self._holders: dict[bytes, tuple[BlockPool, ...]] = {}

    def __len__(self) -> int:
        """Digests that some pool knows."""
        return len(self._holders)

    def holders(self, digest: bytes) -> Seq[BlockPool]:
        return self._holders.get(digest, ())

    def add(self, digest: bytes, pool: BlockPool) -> None:
        self._holders[digest] = (*self._holders.get(digest, ()), pool)

    def remove(self, digest: bytes, pool: BlockPool) -> None:
        left = tuple(holder for holder in self._holders[digest] if holder is not pool)
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
