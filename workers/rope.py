"""Rotary position embedding, by the frequencies that transformers computes from a checkpoint's config."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig


class Rope:
    """cos and sin of each position up to `length`, [length, head_dim / 2]. Raises ValueError for an unknown scaling."""

    def __init__(self, config: PretrainedConfig, length: int, device: torch.device) -> None:
        inverse, self.attention_factor = frequencies(config)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse.float())
        self.cos = (angles.cos() * self.attention_factor).to(device)
        self.sin = (angles.sin() * self.attention_factor).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of [tokens] positions: [tokens, 1, head_dim / 2], ready to broadcast over heads."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on the attention, for the config's kind of scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        theta = float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    if kind not in ROPE_INIT_FUNCTIONS or kind == "dynamic":
        raise ValueError(f"rotary scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, float(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, head_dim] turned by each token's angles: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
