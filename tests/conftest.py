"""Models that the tests share: the real one, and tiny random ones in the same layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cluster.local_ray import prepare_environment
from workers.checkpoint import resolve

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask a hub


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched and converted once into the user's cache."""
    return resolve("smollm2")


def save_tiny(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    """A random model of a few thousand parameters, the same at every call. Vectors of an architecture other than
    Llama's (norms, biases) are random too, where transformers begins with ones and zeros that no test would miss."""
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**settings, **changes}))
    if model_type != "llama":
        with torch.no_grad():
            for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
                vector.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    """A tiny random Llama with the real model's tokenizer, whose vocabulary it therefore has."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests that need one. Its CPUs are counted, not used: what runs on them is small."""
    prepare_environment()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
