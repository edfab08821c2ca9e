"""Blocks of a KV cache as bytes, and back: of whatever its pages hold, for a range of its KV heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.kv_cache import KvCache
from workers.parts import Part


def byte_planes(planes: Sequence[Tensor]) -> list[Tensor]:
    """`KvCache.planes` as [layers * 2, blocks, block_size, kv heads, bytes] of uint8 that share their memory."""
    with_elements = (plane if plane.dim() == 6 else plane.unsqueeze(-1) for plane in planes)  # scales have none
    return [plane.flatten(0, 1).view(torch.uint8) for plane in with_elements]


def _part_shape(shape: Sequence[int], blocks: int, heads: Part) -> tuple[int, ...]:
    return (shape[0], blocks, shape[2], heads.size, shape[4])


class HostPages:
    """Pages in host memory. Copies by numpy, which starts no OpenMP threads: those are the forward's."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        self._planes = [plane.numpy() for plane in byte_planes(planes)]

    def block_bytes(self, heads: int) -> int:
        """Of one block of so many KV heads, over all planes."""
        return sum(plane.shape[0] * plane.shape[2] * heads * plane.shape[4] for plane in self._planes)

    def read(self, blocks: Sequence[int], heads: Part) -> Tensor:
        """The blocks' content, [bytes] of uint8 in host memory: of each plane in turn its blocks, cut to the heads."""
        content = np.empty(len(blocks) * self.block_bytes(heads.size), dtype=np.uint8)
        index, at = np.asarray(blocks), 0
        for plane in self._planes:
            shape = _part_shape(plane.shape, len(blocks), heads)
            part = content[at : at + math.prod(shape)].reshape(shape)
            part[...] = plane[:, index, :, heads.start : heads.stop]
            at += part.size
        return torch.from_numpy(content)

    def write(self, blocks: Sequence[int], heads: Part, content: Tensor) -> None:
        """What `read` gave, into these blocks."""
        source, index, at = content.numpy(), np.asarray(blocks), 0
        for plane in self._planes:
            shape = _part_shape(plane.shape, len(blocks), heads)
            part = source[at : at + math.prod(shape)].reshape(shape)
            plane[:, index, :, heads.start : heads.stop] = part
            at += part.size

    def computed(self) -> None:
        """What a forward wrote is there once it has returned."""


class DevicePages:
    """Pages on a CUDA device. Copies on a stream of its own, beside the forward's."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        self._planes = byte_planes(planes)
        self._device = planes[0].device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def block_bytes(self, heads: int) -> int:
        return sum(plane.shape[0] * plane.shape[2] * heads * plane.shape[4] for plane in self._planes)

    def read(self, blocks: Sequence[int], heads: Part) -> Tensor:
        """[bytes] of uint8 on the device; what forwards that have returned wrote is in it."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written)
            content = gather(self._planes, blocks, heads)
        self._stream.synchronize()
        return content

    def write(self, blocks: Sequence[int], heads: Part, content: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            scatter(self._planes, blocks, heads, content.to(self._device))
        self._stream.synchronize()

    def computed(self) -> None:
        """Called by the thread that runs forwards, after each of them: the device may still be at it."""
        self._written.record(torch.cuda.current_stream(self._device))


def gather(planes: Sequence[Tensor], blocks: Sequence[int], heads: Part) -> Tensor:
    """[bytes] of uint8, of byte planes, in the order of `HostPages.read`."""
    index = torch.tensor(blocks, dtype=torch.int64, device=planes[0].device)
    return torch.cat([p.index_select(1, index).narrow(3, heads.start, heads.size).reshape(-1) for p in planes])


def scatter(planes: Sequence[Tensor], blocks: Sequence[int], heads: Part, content: Tensor) -> None:
    """What `gather` gave, into these blocks."""
    index = torch.tensor(blocks, dtype=torch.int64, device=planes[0].device)
    at = 0
    for plane in planes:
        shape = _part_shape(plane.shape, len(blocks), heads)
        part = content.narrow(0, at, math.prod(shape)).view(shape)
        plane.narrow(3, heads.start, heads.size).index_copy_(1, index, part)
        at += math.prod(shape)


Pages = HostPages | DevicePages


def make_pages(cache: KvCache) -> Pages:
    on_device = cache.planes[0].device.type == "cuda"
    return DevicePages(cache.planes) if on_device else HostPages(cache.planes)
