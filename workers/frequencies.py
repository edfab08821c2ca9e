"""A model's rotary frequencies, and what became of them when its context was stretched.

`default`: Su and others, RoFormer, 2021. `linear`: Chen and others, Extending Context Window of Large Language Models
via Positional Interpolation, 2023. `llama3`: Llama Team, The Llama 3 Herd of Models, 2024. `yarn`: Peng and others,
YaRN: Efficient Context Window Extension of Large Language Models, 2023. Bit for bit what transformers computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workers.model_config import ModelConfig


def frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on the attention. Raises ValueError for a scaling
    that is not known or lacks a number."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in _SCALINGS:
        raise ValueError(f"rotary scaling {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    if kind != "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rotary embedding of a part of each head is not supported")
    try:
        return _SCALINGS[kind](_wavelengths(rope["rope_theta"], config.head_dim), config)
    except KeyError as missing:
        raise ValueError(f"config.json: rotary scaling {kind!r} needs {missing.args[0]}") from None
    except TypeError:
        raise ValueError(f"config.json: rotary scaling {kind!r} has what is no number") from None


def _wavelengths(theta: float, dim: int) -> Tensor:
    """In positions, but for 2 pi: [dim / 2]."""
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return powers


def _as_they_are(wavelengths: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    return 1.0 / wavelengths, 1.0


def _linear(wavelengths: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """As if positions were nearer to each other."""
    return 1.0 / wavelengths / config.rope_parameters["factor"], 1.0


def _llama3(wavelengths: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Short waves stay, long ones are stretched, and those between are a blend by how often they went round before."""
    rope = config.rope_parameters
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    before, plain = rope["original_max_position_embeddings"], 1.0 / wavelengths
    waves = 2 * math.pi / plain
    share = (before / waves - low) / (high - low)
    blend = (1 - share) * plain / factor + share * plain
    long, short = waves > before / low, waves < before / high
    return torch.where(long, plain / factor, torch.where(short, plain, blend)), 1.0


def _yarn(wavelengths: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """By dimension: those that went round often before stay, those that did not once are stretched, with a ramp between
    the two; and attention is sharpened a little."""
    rope, dim = config.rope_parameters, config.head_dim
    theta, before = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"] or config.max_position_embeddings / before

    def dimension(rounds: float) -> float:
        """Where a wave goes round so often in the context before."""
        return (dim * math.log(before / (rounds * 2 * math.pi))) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    stretched = 1.0 / (factor * wavelengths)
    return stretched * (1 - keep) + 1.0 / wavelengths * keep, _sharpening(rope, factor)


def _sharpening(rope: Mapping[str, Any], factor: float) -> float:
    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return of(above) / of(below) if above and below else of(1.0)


_SCALINGS: dict[str, Callable[[Tensor, ModelConfig], tuple[Tensor, float]]] = {
    "default": _as_they_are,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
