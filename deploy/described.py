"""Models and accelerators as a command line describes them: by a known name, by a file, or by numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from scheduler.hardware import Listed, gpu
from scheduler.roofline import Hardware, ModelShape
from scheduler.shapes import known_shape, shape_from_config

BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Of an element in each format."""


def bytes_of(name: str) -> float:
    """Raises ValueError for an unknown format."""
    if name.lower() not in BYTES:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(BYTES)}")
    return BYTES[name.lower()]


def shape_of(model: str, weight_bytes: float, kv_bytes: float) -> ModelShape:
    """Of a known model, or of a directory with a config.json. Raises ValueError in one line."""
    config = Path(model).expanduser()
    config = config / "config.json" if config.is_dir() else config
    if config.is_file():
        try:
            fields = json.loads(config.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{config} cannot be read: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{config} is no model's config.json")
        return shape_from_config(config.parent.name, fields, weight_bytes, kv_bytes)
    return known_shape(model, weight_bytes, kv_bytes)


def gpu_of(
    name: str | None, peak_tflops: float | None, bandwidth_tbps: float | None, memory_gb: float | None, link_gbps: float
) -> Listed:
    """From the table, or by flags; flags beside a name replace its peaks. Raises ValueError in one line."""
    if name is None and (peak_tflops is None or bandwidth_tbps is None):
        raise ValueError("give --gpu, or both --peak-tflops and --bandwidth-tbps")
    for flag, value in (("--peak-tflops", peak_tflops), ("--bandwidth-tbps", bandwidth_tbps)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{flag} must be above 0, got {value}")
    if name is not None:
        listed = gpu(name)
        known = listed.hardware
        peak = known.peak_flops if peak_tflops is None else peak_tflops * 1e12
        bandwidth = known.bandwidth if bandwidth_tbps is None else bandwidth_tbps * 1e12
        memory = known.memory_bytes if memory_gb is None else memory_gb * 1e9
        return replace(listed, hardware=replace(known, peak_flops=peak, bandwidth=bandwidth, memory_bytes=memory))
    hardware = Hardware(
        name="by flags",
        peak_flops=(peak_tflops or 0) * 1e12,
        bandwidth=(bandwidth_tbps or 0) * 1e12,
        memory_bytes=(80 if memory_gb is None else memory_gb) * 1e9,
        link_bytes=link_gbps * 1e9,
    )
    return Listed(hardware, "given by flags", link_gbps * 1e9)
