"""x W^T, with the weight kept in the order in which the processor reads it.

On CPU in float32 that is the order of `workers/packed.py`; it replaces the plain weight, so that no second copy stays
in memory. torch's plain `F.linear` reorders the weight on every call there, and is several times slower at the few rows
of a decode.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from workers.packed import Packed

_NO_BIAS: NDArray[np.float32] = np.empty(0, dtype=np.float32)


class Linear:
    """Callable on [tokens, in] -> [tokens, out]. `packed`: whether the weight is in panels (None: if it can be)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._weight = Packed(weight) if (can_pack(weight) if packed is None else packed) else weight

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, Tensor):
            return F.linear(x, self._weight, self.bias)
        y = self._weight.multiply(x)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def packed(self) -> bool:
        return not isinstance(self._weight, Tensor)

    @property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As kernels take it, where the weight is packed: panels, and the bias, which is empty where there is none."""
        assert isinstance(self._weight, Packed)
        return self._weight.array, _NO_BIAS if self.bias is None else self.bias.numpy()

    def rows(self, which: Tensor) -> Tensor:
        """Of the weight, [n, in]: what an embedding looks up that shares its weight with the head."""
        if isinstance(self._weight, Tensor):
            return F.embedding(which, self._weight)
        return self._weight.rows(which)


def can_pack(weight: Tensor) -> bool:
    """Dense float32 on a CPU. On a Mac torch has Apple's own products, which no code of ours comes near."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and sys.platform != "darwin"
