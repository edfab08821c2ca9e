"""What can be known to fail before anything is started: a minute of start-up should not end in a typing error."""

from __future__ import annotations

from pathlib import Path

from cluster.config import EngineConfig
from deploy.errors import CommandError
from deploy.output import check_file
from workers.config import WorkerDescription
from workers.model_config import ModelConfig, read_config
from workers.tokenizer import check_tokenizer


def check_log(config: EngineConfig) -> None:
    """Raises CommandError where the decision log has no place. To be known before a model is fetched."""
    check_file("--iteration-log", None if config.iteration_log is None else Path(config.iteration_log))


def check(config: EngineConfig, model_dir: Path) -> None:
    """Raises CommandError, in one line that says what to do, where this machine cannot serve that model so."""
    import torch

    from workers.loader import check_weights

    try:
        model = read_config(model_dir)
        check_tokenizer(model_dir)
        check_weights(model_dir)
    except (ValueError, OSError) as error:
        raise CommandError(f"cannot serve {config.model}: {error}") from None
    _check_length(config, model)
    for flag, degree in _degrees(config):
        if degree > model.num_key_value_heads:
            raise CommandError(
                f"{flag} {degree} is too large: {config.model} has {model.num_key_value_heads} KV heads to divide", 2
            )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: this machine has no CUDA device that torch can use; leave it out for CPU", 2)
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    _check_kernels(config, "cpu" if on_cpu else "cuda")
    if on_cpu:
        _check_host_memory(config, model_dir, _kv_bytes_per_token(config, model))


def _check_length(config: EngineConfig, model: ModelConfig) -> None:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise CommandError(
            f"--max-model-len {config.max_model_len} is too large: {config.model} has {longest} positions", 2
        )


def _check_kernels(config: EngineConfig, device: str) -> None:
    from workers.attention import PAGE_SIZE, check_page_size, choose_backend

    try:
        choose_backend(config.attention, device)
        check_page_size(config.block_size or PAGE_SIZE[device], device)
    except ValueError as error:
        raise CommandError(str(error), 2) from None


def _degrees(config: EngineConfig) -> list[tuple[str, int]]:
    own = [("--prefill-tp", config.prefill_tp), ("--decode-tp", config.decode_tp)] if config.separated else []
    return [("--tp", config.tp), *((flag, degree) for flag, degree in own if degree is not None)]


def _kv_bytes_per_token(config: EngineConfig, model: ModelConfig) -> int:
    import torch

    from workers.kv_cache import bytes_per_block
    from workers.kv_dtype import choose_kv_dtype

    layers, heads = model.num_hidden_layers, model.num_key_value_heads
    compute = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        kept = choose_kv_dtype(config.kv_dtype, compute, torch.device("cpu"))
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    return bytes_per_block(layers, 1, heads, model.head_dim, kept)


def _check_host_memory(config: EngineConfig, model_dir: Path, kv_bytes_per_token: int) -> None:
    """By the rule that the cluster sizes its pool with, for a group that has this machine's memory."""
    import psutil

    from cluster.sizing import kv_blocks, swap_blocks

    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    free = psutil.virtual_memory().available // config.group_count - weights
    block_size = config.block_size or 16
    rank = WorkerDescription(
        rank=0,
        device="cpu",
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        attention=config.attention,
        collectives="",
        block_size=block_size,
        max_model_len=0,
        vocab_size=0,
        layers=0,
        query_heads=0,
        kv_heads=0,
        weight_bytes=weights,
        kv_bytes_per_block=kv_bytes_per_token * block_size,
        kv_reading_bytes_per_block=0,
        free_bytes=max(0, free),
        host_free_bytes=max(0, free),
        iteration_bytes=0,
        threads=0,
        pid=0,
    )
    try:
        swap_blocks(config, [rank], kv_blocks(config, [rank]))
    except ValueError as error:
        asked_for = (config.kv_memory, config.num_blocks, config.block_size, config.swap_memory)
        raise CommandError(str(error), 2 if any(asked_for) else 1) from None
