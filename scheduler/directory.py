"""Which of several pools know a block: asked about a prompt, before it is known whose it will be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.blocks import BlockPool


class Directory(dict[bytes, "BlockPool | tuple[BlockPool, ...]"]):
    """By digest. Nearly all have one pool, which then is there by itself: there are millions of them. Pools keep their
    own entries; nobody else writes here."""

    def holders(self, digest: bytes) -> Seq[BlockPool]:
        found = self.get(digest, ())
        return found if isinstance(found, tuple) else (found,)

    def add(self, digest: bytes, pool: BlockPool) -> None:
        before = self.holders(digest)
        self[digest] = (*before, pool) if before else pool

    def remove(self, digest: bytes, pool: BlockPool) -> None:
        left = tuple(holder for holder in self.holders(digest) if holder is not pool)
        if left:
            self[digest] = left
        else:
            del self[digest]
