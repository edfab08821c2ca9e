"""Dimensions of models: the usual ones by name, any other from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.roofline import ModelShape


def shape_from_config(
    name: str, config: Mapping[str, Any], weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> ModelShape:
    """From a Hugging Face config of a dense decoder with gated MLP. Raises ValueError naming a missing field."""
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        query_heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the config of {name} has no usable {error}; dense decoders are supported") from None
    if any(key in config for key in ("num_local_experts", "n_routed_experts", "num_experts")):
        raise ValueError(f"{name} is a mixture of experts; dense decoders are supported")
    kv_heads = int(config.get("num_key_value_heads") or query_heads)
    head_dim = int(config.get("head_dim") or hidden // query_heads)
    attention = hidden * head_dim * (2 * query_heads + 2 * kv_heads)
    mlp = 3 * hidden * inner
    norms = 2 * hidden * layers + hidden
    # The output head multiplies; the embedding table is only looked up, and is the head itself where they are tied.
    parameters = layers * (attention + mlp) + norms + vocab * hidden
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelShape(
        name, parameters, layers, hidden, query_heads, kv_heads, head_dim, weight_bytes, kv_bytes, vocab, tied
    )


def _config(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, head_dim: int = 0, tied: bool = False
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "head_dim": head_dim or hidden // heads,
        "tie_word_embeddings": tied,
    }


CONFIGS: dict[str, dict[str, int]] = {
    "SmolLM2-135M": _config(576, 30, 9, 3, 1536, 49152, tied=True),
    "Qwen3-0.6B": _config(1024, 28, 16, 8, 3072, 151936, head_dim=128, tied=True),
    "Qwen3-4B": _config(2560, 36, 32, 8, 9728, 151936, head_dim=128, tied=True),
    "Qwen3-8B": _config(4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "Qwen3-14B": _config(5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "Qwen3-32B": _config(5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Llama-3.2-1B": _config(2048, 16, 32, 8, 8192, 128256, tied=True),
    "Llama-3.2-3B": _config(3072, 28, 24, 8, 8192, 128256, tied=True),
    "Llama-3.1-8B": _config(4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _config(8192, 80, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _config(16384, 126, 128, 8, 53248, 128256),
    "Llama-2-7B": _config(4096, 32, 32, 32, 11008, 32000),
    "Llama-2-70B": _config(8192, 80, 64, 8, 28672, 32000),
    "Mistral-7B": _config(4096, 32, 32, 8, 14336, 32768),
    "Yi-34B": _config(7168, 60, 56, 8, 20480, 64000),
}
"""From the models' published config.json files."""


def known_shape(name: str, weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> ModelShape:
    """By name, with or without an organisation before it and a suffix behind it. Raises ValueError listing them."""
    wanted = name.split("/")[-1].lower().replace("meta-", "")
    for known, config in CONFIGS.items():
        if (
            wanted == known.lower()
            or wanted.startswith(known.lower() + "-")
            or wanted == known.lower().replace("-", "")
        ):
            return shape_from_config(known, config, weight_bytes, kv_bytes)
    if wanted == "smollm2":
        return shape_from_config("SmolLM2-135M", CONFIGS["SmolLM2-135M"], weight_bytes, kv_bytes)
    raise ValueError(f"unknown model {name!r}; known: {', '.join(CONFIGS)} (or give a directory with a config.json)")
