"""Sizes of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.admission import Limits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What does not change while a group runs. `max_running` sequences hold a slot at once."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_running: int = 64
    max_queued_requests: int = 1024
    prefix_caching: bool = True

    @property
    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.vocab_size, self.num_blocks, self.block_size)
