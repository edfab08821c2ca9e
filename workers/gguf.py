"""A GGUF file of the Llama family, turned once into a Hugging Face checkpoint: config.json, safetensors, tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.bars import Report
from workers.checkpoint import CheckpointError
from workers.gguf_tokenizer import write_tokenizer

SHARD_BYTES = 4 * 2**30

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_COMPUTED = {"rope_freqs.weight"}  # not weights: what the rope settings of the configuration give

Array = npt.NDArray[Any]


class GGUFFile:
    """Metadata by key, and tensors by name, of one file (memory-mapped)."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file ({error}); fetch it again") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} says nothing of {key}; it is incomplete or no Llama model")
        return value

    def array(self, name: str) -> Array:
        """The tensor as near as possible to what it was before quantisation, in float32, or as the float16 it is."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        if tensor.tensor_type.name == "F16":
            return np.asarray(tensor.data)
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path} is quantised as {tensor.tensor_type.name}, which cannot be read; take another one"
            ) from None


def convert(path: Path, directory: Path, progress: Report) -> None:
    """Write the checkpoint of the GGUF file `path` into `directory`. Raises CheckpointError."""
    file = GGUFFile(path)
    config = hf_config(file)
    write_tokenizer(file, directory)
    _write_weights(file, config, directory, progress)
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(directory / "generation_config.json", generation)
    _write_json(directory / "config.json", config)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json's content. Raises CheckpointError where the architecture is another than Llama's."""
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path} is a {architecture} model; only the llama architecture is supported")
    if "blk.0.ffn_gate_exps.weight" in file.tensors or file.get("llama.expert_count", 0):
        raise CheckpointError(f"{file.path} is a mixture of experts, which is not supported")
    hidden, heads = file.need("llama.embedding_length"), file.need("llama.attention.head_count")
    head_dim = file.get("llama.attention.key_length") or file.get("llama.rope.dimension_count") or hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": file.need("llama.feed_forward_length"),
        "num_hidden_layers": file.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.need("llama.context_length"),
        "rms_norm_eps": _as_written(file.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": "float16" if file.tensors["token_embd.weight"].tensor_type.name == "F16" else "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := file.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def _as_written(number: float) -> float:
    """GGUF stores float32, so 1e-5 comes back as 9.999999747378752e-06; its shortest decimal is what was meant."""
    return float(str(np.float32(number)))


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = _as_written(file.get("llama.rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind = file.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = _as_written(file.need("llama.rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise CheckpointError(f"{file.path} scales its positions by {kind}, which cannot be read from a GGUF file")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """GGUF holds Llama 3's scaling as a divisor per frequency. All of its models share three of the four settings, so
    the settings are recovered from the greatest divisor, and checked against all of them."""
    divisors = file.array("rope_freqs.weight").astype(np.float64).ravel()
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    if divisors.shape != blend.shape or not np.allclose(1 / divisors, (1 - blend) / factor + blend, rtol=1e-3):
        raise CheckpointError(f"{file.path} scales its positions in an unknown way; take the safetensors checkpoint")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _write_weights(file: GGUFFile, config: dict[str, Any], directory: Path, progress: Report) -> None:
    """Safetensors in shards that fit into memory: one file named as Hugging Face names a single one, or an index."""
    from safetensors.numpy import save_file

    _check_disk(directory, _weight_bytes(file, config))
    shards: list[list[str]] = []
    for shard in _shards(file, config, progress):
        written = directory / f"shard-{len(shards)}"
        save_file(shard, written, metadata={"format": "pt"})
        written.chmod(0o644)
        shards.append(list(shard))
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
    else:
        _name_shards(directory, shards, _weight_bytes(file, config))


def _weight_bytes(file: GGUFFile, config: dict[str, Any]) -> int:
    weights = (tensor for name, tensor in file.tensors.items() if name not in _COMPUTED)
    return sum(int(tensor.n_elements) for tensor in weights) * int(np.dtype(config["dtype"]).itemsize)


def _shards(file: GGUFFile, config: dict[str, Any], progress: Report) -> Iterator[dict[str, Array]]:
    """The weights by their Hugging Face names, in groups of about SHARD_BYTES."""
    total, done, size = _weight_bytes(file, config), 0, 0
    shard: dict[str, Array] = {}
    for name in file.tensors:
        if name in _COMPUTED:
            continue
        array = _untangle(name, file.array(name), config).astype(config["dtype"], copy=False)
        if shard and size + array.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[_hf_name(file, name)] = np.ascontiguousarray(array)
        size += array.nbytes
        done += array.nbytes
        progress(f"convert {file.path.stem}", done, total)
    yield shard


def _untangle(name: str, array: Array, config: dict[str, Any]) -> Array:
    """GGUF interleaves each query and key head's rotary halves ([heads, dim / 2, 2]); Hugging Face has them one after
    the other ([heads, 2, dim / 2])."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part not in ("attn_q", "attn_k"):
        return array
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _hf_name(file: GGUFFile, name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _INNER:
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _OUTER:
        return f"{_OUTER[parts[0]]}.{parts[1]}"
    raise CheckpointError(f"{file.path} has a tensor {name!r} that a Llama model has not; it is not supported")


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        filename = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / filename)
        where.update(dict.fromkeys(names, filename))
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _check_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(
            f"the converted model needs {needed / 1e9:.1f} GB and {directory.parent} has {free / 1e9:.1f} GB free; "
            f"set STALLFREE_CACHE to another place"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
