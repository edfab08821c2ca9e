"""A checkpoint's weights, read shard by shard: a rank reads only the rows and columns that are its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.parts import Part


class Weights:
    """The safetensors files of a model directory, opened for reading. Counts the bytes that were read. Raises
    ValueError, in one line that names it, for a file that is none."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, note: Callable[[int], None]) -> None:
        self._dtype, self._device, self._note = dtype, device, note
        self._files: dict[str, Any] = {path.name: _opened(path) for path in folder.glob("*.safetensors")}
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        self.bytes_read = 0

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._where.clear()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def rows(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor, or some of its first dimension. Raises ValueError for one that is not in the checkpoint."""
        return self._read(name, (slice(None) if part is None else slice(part.start, part.stop),))

    def columns(self, name: str, part: Part) -> Tensor:
        """Some of the second dimension of a matrix."""
        return self._read(name, (slice(None), slice(part.start, part.stop)))

    def _read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        if name not in self._where:
            raise ValueError(f"the checkpoint has no weight {name!r}")
        tensor: Tensor = self._where[name].get_slice(name)[where]
        self.bytes_read += tensor.numel() * tensor.element_size()
        self._note(self.bytes_read)
        # In memory of its own: as part of a file that is mapped it would keep all of that file mapped.
        return torch.empty(tensor.shape, dtype=self._dtype, device=self._device).copy_(tensor)


def check_weights(folder: Path) -> None:
    """Raises ValueError, in one line that names it, for a safetensors file whose header cannot be read or that is not
    as long as that says. Reads no weights."""
    for path in folder.glob("*.safetensors"):
        _opened(path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """What a checkpoint says it is stored in."""
    config = json.loads((folder / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
