"""What the workers of separated groups are told to do with KV (`scheduler.handoff`), and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Open:
    """The ranks of `group` are to take what comes for `lease` into `blocks`."""

    group: int
    lease: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """The ranks of `group` are to send `blocks`, which are under their own lease `number`, to the ranks of `target`,
    for the places `first` .. of those that were opened there under `lease`."""

    group: int
    number: int
    blocks: tuple[int, ...]
    target: int
    lease: int
    first: int


@dataclass(frozen=True, slots=True)
class Close:
    """The ranks of `group` are to touch nothing any more under `lease`, from their answer on."""

    group: int
    lease: int


Order = Open | Send | Close


@dataclass(frozen=True, slots=True)
class Moved:
    """A request's KV as it went from one group to another: tokens of context, blocks that were sent and those that were
    there already, bytes, seconds that sending took, bytes that went while the prompt was still being computed, and
    seconds from its first token to its being with the other group. `sends` are from when to when (in the schedulers'
    clock) each part was on its way, the waiting for its turn included."""

    request_id: str
    source: int
    target: int
    tokens: int
    blocks_sent: int
    blocks_shared: int
    bytes: int
    send_s: float
    early_bytes: int
    wait_s: float
    sends: tuple[tuple[float, float], ...] = ()

    @property
    def bandwidth(self) -> float:
        """Bytes a second while something was being sent."""
        return self.bytes / self.send_s if self.send_s > 0 else 0.0
