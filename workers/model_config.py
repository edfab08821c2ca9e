"""What config.json says of a model, as far as it is computed with. Read without transformers, which takes a rank 70 MiB
to import; what a checkpoint leaves out is what transformers takes then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that are computed, and the model type that a checkpoint of theirs has if it names none."""
_EVERY_FAMILY = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""By model type."""
_STRETCHED = ("llama3", "yarn")
"""Rotary scalings that know the context the model had before."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Named as in config.json. `rope_parameters`: `rope_type`, `rope_theta`, and what else that type has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]


def read_config(folder: Path) -> ModelConfig:
    """Raises ValueError, in one line, for what is no configuration or for an architecture that is not computed, and
    OSError where there is no config.json."""
    said = _content(folder / "config.json")
    known = {**_EVERY_FAMILY, **_LEFT_OUT[_family(said)]}
    given = {**known, **said}
    if given.get("sliding_window") and ("use_sliding_window" not in known or given["use_sliding_window"]):
        raise ValueError("sliding-window attention is not supported")
    if (activation := given.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"activation {activation!r} is not supported; supported: silu")
    heads, hidden = _whole(given, "num_attention_heads"), _whole(given, "hidden_size")
    if given.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} does not divide by num_attention_heads {heads}")
    longest = _whole(given, "max_position_embeddings")
    return ModelConfig(
        vocab_size=_whole(given, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(given, "intermediate_size"),
        num_hidden_layers=_whole(given, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_whole(given, "num_key_value_heads", heads),
        head_dim=_whole(given, "head_dim", hidden // heads),
        max_position_embeddings=longest,
        rms_norm_eps=_number(given, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
        rope_parameters=_rope(given, longest),
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("config.json is no object")
    return content


def _family(said: Mapping[str, Any]) -> str:
    """The model type by which what is left out is known."""
    names = said.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    known = [name for name in names if name in FAMILIES]
    if not known:
        found = ", ".join(sorted(names)) or said.get("model_type") or "unknown"
        raise ValueError(f"architecture {found} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    family = said.get("model_type", FAMILIES[known[0]])
    if family not in _LEFT_OUT:
        raise ValueError(f"model type {family!r} is not supported; supported: {', '.join(sorted(_LEFT_OUT))}")
    return str(family)


def _whole(given: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = given.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} is {value!r}, where a positive whole number is needed")
    return value


def _number(given: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = given.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}, where a number is needed")
    return float(value)


def _rope(given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Checkpoints older than transformers 5 have the scaling alone in `rope_scaling`, its type in `type`, and theta
    beside it."""
    found = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ValueError(f"config.json: rope_parameters are {found!r}, where an object is needed")
    rope = {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}
    rope["rope_theta"] = _number(rope, "rope_theta", _number(given, "rope_theta", 10000.0))
    if rope["rope_type"] in _STRETCHED:
        before = given.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
        rope["original_max_position_embeddings"] = longest if before is None else before
    return rope
