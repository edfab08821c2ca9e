"""What a worker remembers of each sequence between iterations, and how segments become a flat batch.

Arrays over slots, so that building a batch is a few vector operations: tokens [slots, max_model_len], block tables
[slots, blocks a sequence may have].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.plan import Admission, Forward
from scheduler.sampling import SamplingParams


class PlanError(ValueError):
    """A plan that contradicts what this worker knows. A bug of the sender, not a fault of a request."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A forward's decodes and chunks as arrays: slot, first position and count of each, and which of them sample."""

    slots: NDArray[np.int64]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    sampling: NDArray[np.int64]


class Slots:
    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self._blocks_of_one = -(-max_model_len // block_size)
        self.tokens = np.zeros((slots, max_model_len + 1), dtype=np.int32)
        self.tables = np.zeros((slots, self._blocks_of_one), dtype=np.int32)
        self.lengths = np.zeros(slots, dtype=np.int32)
        self.computed = np.zeros(slots, dtype=np.int32)
        self.block_counts = np.zeros(slots, dtype=np.int32)
        self.prompt_lengths = np.zeros(slots, dtype=np.int32)
        self.sampling: list[SamplingParams | None] = [None] * slots

    def release(self, slot: int) -> None:
        self._require_taken(slot)
        self.sampling[slot] = None

    def admit(self, admission: Admission, num_blocks: int) -> None:
        slot, count = admission.slot, len(admission.tokens)
        if not 0 <= slot < len(self.sampling):
            raise PlanError(f"slot {slot} of {len(self.sampling)}")
        if self.sampling[slot] is not None:
            raise PlanError(f"slot {slot} is taken")
        if not 0 < count < self.tokens.shape[1] or not 0 < admission.prompt_tokens <= count:
            raise PlanError(f"{count} tokens do not fit a slot of {self.tokens.shape[1] - 1}")
        if admission.computed >= count:
            raise PlanError(f"of {count} tokens {admission.computed} are computed, which leaves none")
        self.tokens[slot, :count] = admission.tokens
        self.lengths[slot], self.computed[slot], self.block_counts[slot] = count, admission.computed, 0
        self.prompt_lengths[slot] = admission.prompt_tokens
        self.sampling[slot] = admission.sampling
        self._append_blocks(slot, admission.blocks, num_blocks)

    def batch(self, forward: Forward, num_blocks: int, block_size: int) -> Batch:
        """Append the forward's new blocks to their tables and describe it, decodes first. Raises PlanError."""
        for slot, block in forward.new_blocks:
            self._append_blocks(slot, (block,), num_blocks)
        for segment in forward.chunks:
            self._append_blocks(segment.slot, segment.new_blocks, num_blocks)
        chunks = forward.chunks
        slots = np.array([*forward.decodes, *(s.slot for s in chunks)], dtype=np.int64)
        self._require_all_taken(slots)
        decodes = slots[: len(forward.decodes)]
        if (self.computed[decodes] + 1 != self.lengths[decodes]).any():
            raise PlanError("a decode of a slot whose other tokens have not been computed")
        starts = np.concatenate([self.computed[decodes], np.array([s.start for s in chunks], dtype=np.int32)])
        counts = np.concatenate([np.ones_like(decodes, dtype=np.int32), np.array([s.count for s in chunks], np.int32)])
        ends = starts + counts
        if len(slots) == 0 or (counts < 1).any() or (starts < 0).any() or (ends > self.lengths[slots]).any():
            raise PlanError("a segment has no tokens, or tokens that do not exist")
        if len(np.unique(slots)) < len(slots):
            raise PlanError("a slot is twice in one forward")
        if (ends > self.block_counts[slots] * block_size).any():
            raise PlanError("a segment has no block for some of its tokens")
        sampling = np.array(
            [*range(len(decodes)), *(i for i, s in enumerate(chunks, len(decodes)) if s.sample)], np.int64
        )
        if (ends[sampling] < self.lengths[slots[sampling]]).any():
            raise PlanError("a segment samples a token that exists")
        self.computed[slots] = ends
        return Batch(slots, starts, counts, sampling)

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """One sampled token to each slot."""
        self.tokens[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1

    def _append_blocks(self, slot: int, blocks: tuple[int, ...], num_blocks: int) -> None:
        if not blocks:
            return
        self._require_taken(slot)
        have, more = int(self.block_counts[slot]), len(blocks)
        if have + more > self._blocks_of_one or not all(0 <= block < num_blocks for block in blocks):
            raise PlanError(f"blocks of slot {slot} are too many, or outside the pool of {num_blocks}")
        self.tables[slot, have : have + more] = blocks
        self.block_counts[slot] = have + more

    def _require_taken(self, slot: int) -> None:
        if not 0 <= slot < len(self.sampling) or self.sampling[slot] is None:
            raise PlanError(f"slot {slot} holds no sequence")

    def _require_all_taken(self, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            self._require_taken(slot)
