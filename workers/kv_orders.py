"""What a rank is told of links and of KV to send, and what it answers. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.parts import Part, split

STALE = "stale lease"
Payload = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """`name` is the link's, the same on both sides; `heads` are the KV heads of the model that go over it. `address` is
    where the taking rank listens, `own_address` that of this rank's interface."""

    name: str
    heads: Part
    address: str
    own_address: str
    payload: Payload = "gloo"


@dataclass(frozen=True, slots=True)
class SendOrder:
    """`blocks` of this rank, under its lease `number`, over these links, for the places `first` .. of those that the
    other side opened under `lease`."""

    number: int
    lease: int
    first: int
    blocks: tuple[int, ...]
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendReport:
    """What became of an order on this rank: bytes that were taken, seconds from its beginning to the last answer, and
    why it failed, or nothing."""

    number: int
    bytes: int
    seconds: float
    error: str = ""


def overlaps(heads: int, senders: int, takers: int) -> list[tuple[int, int, Part]]:
    """(sending rank, taking rank, KV heads) of every pair of ranks that have heads in common, for a model of `heads` KV
    heads on groups of so many ranks."""
    found = []
    for s, mine in enumerate(split(heads, senders)):
        for t, theirs in enumerate(split(heads, takers)):
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if start < stop:
                found.append((s, t, Part(start, stop)))
    return found
