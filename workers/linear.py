"""x W^T, with the weight kept in the order that the processor's kernel reads it.

On CPU in float32 the weight is reordered once for oneDNN, as torch's own inductor does when it freezes a model: plain
`F.linear` reorders on every call, and is several times slower at the few rows of a decode. The reordered weight
replaces the plain one, so that no second copy stays in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKING_ROWS = 64
"""Rows that the layout is chosen for: between a decode batch and a chunk."""


class Linear:
    """Callable on [tokens, in] -> [tokens, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()
        self.packed = can_pack(weight) if packed is None else packed
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether the weight can be reordered: dense float32 on a CPU whose torch has oneDNN."""
    dense = weight.device.type == "cpu" and weight.dtype == torch.float32
    return dense and bool(torch._C._has_mkldnn and torch.backends.mkldnn.enabled)
