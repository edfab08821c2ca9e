"""What one simulated worker group is: what its iterations cost, and the sizes that its scheduler is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from scheduler.costmodel import Coefficients, CostModel
from scheduler.roofline import Hardware, ModelShape, Roofline

VOCABULARY = 1 << 31
"""Token ids of simulated prompts mean nothing but which prompts are alike."""
LONGEST = 1 << 20
"""Tokens of a sequence, where nothing else was said: the KV pool is what bounds it."""
CUDA_PAGE = 256
"""Tokens of a KV block on GPUs, as the workers have it."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between the ranks of one group and those of another, each with its counterpart: bytes of a KV block, bytes a
    second of all ranks together, and the seconds of an empty transfer."""

    block_bytes: float
    bandwidth: float
    latency_s: float

    def seconds(self, blocks: int) -> float:
        return self.latency_s + blocks * self.block_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Machine:
    """`cost` gives the seconds of an iteration; `info` are the facts that a live engine of it would tell. `link` is
    what lies between two groups; None where it is not known."""

    cost: CostModel
    info: EngineInfo
    link: Link | None = None

    @property
    def kv_tokens(self) -> int:
        """Of one group's pool."""
        return self.info.num_blocks * self.info.block_size


def by_hardware(config: EngineConfig, shape: ModelShape, hardware: Hardware) -> Machine:
    """A group of `config.tp` accelerators under the roofline.

    Raises ValueError, in one line, where the model's heads cannot be divided so or its weights leave no room for KV.
    """
    if config.tp > shape.kv_heads:
        raise ValueError(f"--tp {config.tp} is too large: {shape.name} has {shape.kv_heads} KV heads")
    block_size = config.block_size or CUDA_PAGE
    info = EngineInfo(
        model=shape.name,
        model_dir="",
        served_model_name=shape.name,
        max_model_len=config.max_model_len or LONGEST,
        vocab_size=VOCABULARY,
        block_size=block_size,
        num_blocks=config.num_blocks or _blocks(config, shape, hardware, block_size),
        tp=config.tp,
        groups=config.groups,
        policy=config.policy,
        chunk_size=config.chunk_size,
        device="cuda",
        dtype=f"{shape.weight_bytes:g} bytes a weight",
        attention="simulated",
        transport="simulated",
    )
    link = Link(shape.kv_bytes_per_token * block_size, hardware.link_bytes * config.tp, hardware.link_latency_s)
    return Machine(Roofline(shape, hardware, config.tp), info, link)


def _blocks(config: EngineConfig, shape: ModelShape, hardware: Hardware, block_size: int) -> int:
    table = 0.0 if shape.tied else shape.weight_bytes * shape.vocab * shape.hidden
    weights = (shape.read_bytes + table) / config.tp
    block = shape.kv_bytes_per_token * block_size / config.tp
    room = config.gpu_memory_utilization * hardware.memory_bytes - weights
    if config.kv_memory is not None:
        room = min(room, config.kv_memory / config.tp)
    if room < block:
        raise ValueError(
            f"{shape.name} on {config.tp} x {hardware.name}: weights of {weights / 1e9:.1f} GB a GPU leave no room for "
            f"KV in {config.gpu_memory_utilization * hardware.memory_bytes / 1e9:.1f} GB; take more --tp"
        )
    return int(room / block)


def by_calibration(config: EngineConfig, path: Path) -> Machine:
    """The engine whose micro-profile this file is: its coefficients, its KV pool and its longest sequence, unless the
    configuration says otherwise. Raises ValueError, in one line, for a file that is no profile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        coefficients = Coefficients(**{name: float(value) for name, value in content["coefficients"].items()})
        known = {field.name for field in fields(EngineInfo)}
        info = EngineInfo(**{name: value for name, value in content["engine"].items() if name in known})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no calibration as a server's micro-profile writes it: {error}") from None
    changed = replace(
        info,
        swap_blocks=0,  # no cost is known of copies
        max_model_len=config.max_model_len or info.max_model_len,
        block_size=config.block_size or info.block_size,
        num_blocks=config.num_blocks or info.num_blocks,
        groups=config.groups,
        policy=config.policy,
        chunk_size=config.chunk_size,
    )
    return Machine(coefficients, changed)
