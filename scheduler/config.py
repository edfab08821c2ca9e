"""Sizes of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.admission import Limits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What does not change while a group runs. `max_running` sequences hold a slot at once. `swap_blocks` of host
    memory keep the KV of those that gave way (0: it is computed again).

    What waits for a slot is bounded by number and by tokens to be computed; a request that finds nobody waiting is
    queued however long it is.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_running: int = 64
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2**21
    prefix_caching: bool = True
    swap_blocks: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.vocab_size, self.num_blocks, self.block_size)
