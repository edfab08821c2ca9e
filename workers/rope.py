"""Rotary position embedding: from a model's frequencies to the angles of every position."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.frequencies import frequencies
from workers.model_config import ModelConfig


class Rope:
    """cos and sin of each position up to `length`, [length, head_dim / 2]. Raises ValueError for an unknown scaling."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        inverse, self.attention_factor = frequencies(config)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse.float())
        self.cos = (angles.cos() * self.attention_factor).to(device)
        self.sin = (angles.sin() * self.attention_factor).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of [tokens] positions: [tokens, 1, head_dim / 2], ready to broadcast over heads."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, head_dim] turned by each token's angles: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
