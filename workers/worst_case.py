"""The memory that an iteration takes besides weights and KV pages, measured before the pages are sized.

On a GPU a worst-case iteration really runs, and its allocator says what it took. A processor would need half a minute
for it: there iterations of a few tokens run, with every tensor counted, and what they take is extended in proportion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.sampling import MAX_LOGPROBS, SamplingParams

COUNTED_TOKENS = (16, 48)
COUNTED_ROWS = (2, 6)
EVERYTHING_ASKED = SamplingParams(temperature=1.0, top_p=0.9, logprobs=MAX_LOGPROBS)
"""Of what a row may ask for, all that takes memory of the vocabulary's size."""

Shape = list[tuple[int, int]]
"""(start, count) of the segments of an iteration."""


def worst_shape(tokens: int, sequences: int, longest: int) -> Shape:
    """An iteration of `tokens` tokens, or of as many as `sequences` sequences of up to `longest` have: a chunk as long
    as can be, at the end of the longest context, and the rest divided among the others."""
    tokens = min(tokens, sequences * longest)
    sequences = min(sequences, tokens)
    first = min(longest, tokens - (sequences - 1))
    others = [len(range(i, tokens - first, sequences - 1)) for i in range(sequences - 1)]
    return [(longest - first, first), *((0, count) for count in others)]


Ready = Callable[[Shape, bool], Callable[[], object]]
"""Makes room for an iteration of a shape, sampled or not, and gives what runs it."""


def plan_of(shape: Shape, block_size: int, sample: bool = True) -> IterationPlan:
    """All of its segments in the same blocks, from 0 on: what they hold does not matter here."""
    admissions, segments = [], []
    for slot, (start, count) in enumerate(shape):
        end = start + count
        admissions.append(Admission(slot, (0,) * end, end, EVERYTHING_ASKED))
        segments.append(Segment(slot, start, count, tuple(range(-(-end // block_size))), sample))
    return IterationPlan(0, (Forward(chunks=tuple(segments)),), tuple(admissions))


def on_cuda(run: Callable[[], object], device: torch.device) -> int:
    """Bytes by which the most that was allocated exceeds what was before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def by_counting(ready: Ready, tokens: int, sequences: int, longest: int) -> int:
    """Bytes of tensors alive at once, from runs of few tokens: what grows with the tokens, of chunks that sample
    nothing, and what grows with the rows that are sampled from. They are not at their largest at the same moment, but
    neither is gone when the other is."""

    def peak(shape: Shape, sample: bool) -> int:
        run = ready(shape, sample)
        with LiveTensors() as live:
            run()
        return int(live.peak)

    def extended(sizes: tuple[int, int], most: int, wanted: int, shape_of: Callable[[int], Shape], sample: bool) -> int:
        few, more = (min(size, most) for size in sizes)
        least, largest = (peak(shape_of(size), sample) for size in (few, more))
        return largest if few == more else largest + (largest - least) * (wanted - more) // (more - few)

    shape = worst_shape(tokens, sequences, longest)
    total = sum(count for _, count in shape)
    history, chunk = shape[0]

    def chunk_of(count: int) -> Shape:
        """With as much history for its length as the chunk of the worst case has."""
        return [(min(longest - count, -(-history * count // chunk)), count)]

    by_tokens = extended(COUNTED_TOKENS, min(total, longest), total, chunk_of, False)
    return by_tokens + extended(COUNTED_ROWS, len(shape), len(shape), lambda count: [(0, 1)] * count, True)


StorageWeakRef: Any = reductions.StorageWeakRef
TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode


class LiveTensors(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of tensors that torch makes while this is entered: `peak` is the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks this of such a class: its compiler, for which it would import 50 MiB, has nothing to do here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_place(tensor) for tensor in tree_leaves((args, kwargs)) if _counts(tensor)}
        self._alive = {place: kept for place, kept in self._alive.items() if not kept[0].expired()}
        for tensor in tree_leaves(out):
            if _counts(tensor) and _place(tensor) not in given:
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(count for _, count in self._alive.values()))
        return out


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
