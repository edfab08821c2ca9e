"""A model's configuration and its rotary frequencies, beside what transformers makes of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.frequencies import frequencies
from workers.model_config import FAMILIES, read_config

READ = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 500000},
    "of transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "an empty scaling": {"rope_theta": 1e6, "rope_scaling": None},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
    "llama3 of transformers 5": {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0}},
    "llama3, short before": {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 64}},
    "yarn": {"rope_parameters": YARN},
    "yarn of Qwen": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, context beside": {"original_max_position_embeddings": 4096, "rope_parameters": YARN},
    "yarn, not cut to whole": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}},
    "yarn, sharpened": {"rope_parameters": {**YARN, "attention_factor": 1.25}},
    "yarn, scales": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn, no factor": {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 131072},
}


def written(folder: Path, **content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def of_transformers(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inverse, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        return inverse, float(factor)
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, float(factor)


@pytest.mark.parametrize("said", [{}, {"num_attention_heads": 16, "hidden_size": 1024}, {"head_dim": 96}])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_checkpoint_leaves_out(tmp_path: Path, architecture: str, said: dict[str, int]) -> None:
    family = {"architectures": [architecture], "model_type": FAMILIES[architecture], "sliding_window": None}
    ours = read_config(written(tmp_path, **family, **said))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(ours, name) for name in READ} == {name: getattr(theirs, name) for name in READ}
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_transformers_saves_is_read_back(tmp_path: Path, architecture: str) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    more = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": None}
    theirs = AutoConfig.for_model(FAMILIES[architecture], architectures=[architecture], **sizes, **heads, **more)
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert {name: getattr(ours, name) for name in READ} == {name: getattr(theirs, name) for name in READ}
    assert ours.head_dim == 16


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_are_those_of_transformers_to_the_last_bit(
    tmp_path: Path, rope: dict[str, Any], head_dim: int
) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": head_dim}
    inverse, factor = frequencies(read_config(written(tmp_path, **{**llama, **rope})))
    expected, expected_factor = of_transformers(AutoConfig.from_pretrained(tmp_path))
    assert torch.equal(inverse, expected)
    assert factor == expected_factor


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "architecture unknown is not supported; supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({**LLAMA, "model_type": "foreign"}, "model type 'foreign' is not supported"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({**LLAMA, "sliding_window": 128}, "sliding-window attention is not supported"),
        ({**LLAMA, "sliding_window": 128, "use_sliding_window": False}, "sliding-window attention"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding-window attention is not supported"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding-window attention"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64', where a positive whole number is needed"),
        ({**LLAMA, "hidden_size": 640, "num_attention_heads": 9}, "hidden_size 640 does not divide by .* 9"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA, "vocab_size": True}, "vocab_size is True"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({**LLAMA, "rope_parameters": [1]}, r"rope_parameters are \[1\]"),
        ({**LLAMA, "rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_a_line(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_config(written(tmp_path, **content))
    assert "\n" not in str(refused.value)


def test_a_sliding_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    read_config(written(tmp_path, architectures=["Qwen3ForCausalLM"], sliding_window=4096, use_sliding_window=False))


def test_heads_of_a_size_of_their_own_need_not_divide_the_hidden_one(tmp_path: Path) -> None:
    found = read_config(written(tmp_path, **LLAMA, hidden_size=640, num_attention_heads=9, head_dim=64))
    assert (found.hidden_size, found.head_dim) == (640, 64)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_what_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json is no"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "scaling 'dynamic' is not supported; supported: default, linear"),
        ({"rope_type": "longrope"}, "scaling 'longrope' is not supported"),
        ({"rope_type": "linear"}, "scaling 'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "scaling 'llama3' needs low_freq_factor"),
        ({"rope_type": "linear", "factor": "2"}, "scaling 'linear' has what is no number"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "of a part of each head"),
    ],
)
def test_scalings_that_cannot_be_computed(tmp_path: Path, rope: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        frequencies(read_config(written(tmp_path, **LLAMA, rope_parameters=rope)))


def test_a_worker_loads_without_transformers(tiny_model_dir: Path) -> None:
    """Nor what comes with it: 70 MiB in every rank."""
    program = (
        "import sys; from workers.config import WorkerConfig; from workers.worker import Worker; "
        f"worker = Worker(WorkerConfig({str(tiny_model_dir)!r}, threads=1)); worker.load(); worker.allocate(4); "
        "print(sorted({'transformers', 'tokenizers', 'huggingface_hub', 'sympy', 'llguidance'} & sys.modules.keys()))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
