"""A GGUF file of the Llama architecture, converted once into a Hugging Face directory: weights, config and tokenizer.

GGUF keeps the rows of the query and key projections interleaved for its own rotation; they are put back here. The weights
are dequantised with the `gguf` package and written in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much of it is done."""

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4
# What a "gpt2" vocabulary is split by before its merges apply, by llama.cpp's name of it.
_SPLIT_DIGITS = {"smollm", "starcoder", "refact", "command-r"}


class UnsupportedGGUF(ValueError):
    """A GGUF file that cannot be converted; the message says why."""


def convert(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the existing folder `target`.

    Raises UnsupportedGGUF for a file that is no GGUF, or of another architecture or tokenizer.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise UnsupportedGGUF(f"{source} is no readable GGUF file: {error}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UnsupportedGGUF(f"{source} has architecture {fields.get('general.architecture')!r}; supported: llama")
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise UnsupportedGGUF(f"{source} has a {fields.get('tokenizer.ggml.model')!r} tokenizer; supported: gpt2 (BPE)")
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in names)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(fields, target)
    weights = dict(_weights(reader, config, progress))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    def llama(name: str, default: Any = None) -> Any:
        return fields.get(f"llama.{name}", default)

    heads = llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": llama("attention.head_count_kv", heads),
        "head_dim": llama("rope.dimension_count", llama("embedding_length") // heads),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_theta": llama("rope.freq_base", 10000.0),
        "vocab_size": llama("vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _weights(
    reader: GGUFReader, config: dict[str, Any], progress: Progress | None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for done, tensor in enumerate(reader.tensors, 1):
        name = _name(tensor.name)
        if name is not None:
            data = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if tensor.name.endswith("attn_q.weight"):
                data = _undo_interleaving(data, config["num_attention_heads"])
            elif tensor.name.endswith("attn_k.weight"):
                data = _undo_interleaving(data, config["num_key_value_heads"])
            yield name, data
        if progress is not None:
            progress("converting weights", done, len(reader.tensors))


def _name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that is derived (rotation factors)."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        if rest in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"
    if name.startswith("rope_freqs"):
        return None
    raise UnsupportedGGUF(f"unknown tensor {name!r}")


def _undo_interleaving(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads x (d/2 pairs) x 2] rows back to [heads x 2 halves x d/2]."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """tokenizer.json by the `tokenizers` package, and tokenizer_config.json with the chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if fields.get("tokenizer.ggml.pre") in _SPLIT_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif fields.get("tokenizer.ggml.pre") in (None, "default", "gpt-2"):
        tokenizer.pre_tokenizer = byte_level
    elif fields.get("tokenizer.ggml.pre") == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        raise UnsupportedGGUF(f"unknown pre-tokenizer {fields.get('tokenizer.ggml.pre')!r}")
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    added = [AddedToken(t, special=False) for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_TOKEN]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(added)
    tokenizer.save(str(target / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    for key, name in names.items():
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[key] = tokens[index]
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
