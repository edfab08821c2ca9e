"""Accelerators by name. Peaks are the vendors' data sheets (dense bf16); achieved fractions of A100 and H100 are fitted
to the operator profiles published with Vidur (MLSys 2024), and the others take the fractions of their kin.

On models that they were not fitted to, the linear layers of A100 are off by 2.9 to 5.1 % on the average and those of
H100 by 6.1 % (1 to 4,096 tokens, TP 1 to 8); attention by 8.1 % (`benchmarks/fidelity.py`). Attention was measured on
an A100 alone, with the kernels of that time; every other accelerator has its constants from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.roofline import Hardware

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Listed:
    """A known accelerator, where its peaks are from, and the bandwidth of KV between two of them across nodes."""

    hardware: Hardware
    source: str
    across_nodes_bytes: float


def _a100(name: str, tbps: float, memory_gb: float) -> Hardware:
    """With the waves of decodes' attention, which were profiled here and nowhere else: the share is fitted, to every
    eighth point, beside constants that the linear layers have given."""
    return replace(_ampere(name, 312, tbps, memory_gb, 228), processors=108, attention_waves=0.25)


def _ampere(name: str, tflops: float, tbps: float, memory_gb: float, link_gbps: float) -> Hardware:
    """Fractions, norm and tile fitted to the linear layers of four Llama models on an A100."""
    return Hardware(
        name=name,
        peak_flops=tflops * 1e12,
        bandwidth=tbps * 1e12,
        memory_bytes=memory_gb * _GB,
        memory_fraction=0.80,
        compute_fraction=0.75,
        norm=2.0,
        tile=128,
        link_bytes=link_gbps * _GB,
    )


def _hopper(name: str, tflops: float, tbps: float, memory_gb: float, link_gbps: float) -> Hardware:
    """Fractions, norm and tile fitted to the linear layers of two Llama models on an H100."""
    return Hardware(
        name=name,
        peak_flops=tflops * 1e12,
        bandwidth=tbps * 1e12,
        memory_bytes=memory_gb * _GB,
        memory_fraction=0.93,
        compute_fraction=0.76,
        norm=2.0,
        tile=256,
        link_bytes=link_gbps * _GB,
    )


GPUS: dict[str, Listed] = {
    # NCCL point to point as measured: 228 GB/s of NVLink's 300 a direction on A100, 348 of 450 on H100.
    "a100-40": Listed(_a100("A100-40", 1.555, 40), "NVIDIA A100 data sheet", 7.8 * _GB),
    "a100-80": Listed(_a100("A100-80", 2.039, 80), "NVIDIA A100 80GB data sheet", 7.8 * _GB),
    "h100": Listed(_hopper("H100", 989, 3.35, 80, 348), "NVIDIA H100 SXM data sheet", 35.9 * _GB),
    "h200": Listed(_hopper("H200", 989, 4.8, 141, 348), "NVIDIA H200 SXM data sheet", 35.9 * _GB),
    "b200": Listed(_hopper("B200", 2250, 8.0, 180, 696), "NVIDIA B200 data sheet", 35.9 * _GB),
    "mi300x": Listed(_hopper("MI300X", 1307, 5.3, 192, 346), "AMD Instinct MI300X data sheet", 35.9 * _GB),
    "l40s": Listed(_ampere("L40S", 362, 0.864, 48, 25), "NVIDIA L40S data sheet", 7.8 * _GB),
    "l4": Listed(_ampere("L4", 121, 0.30, 24, 25), "NVIDIA L4 data sheet", 7.8 * _GB),
    "a10g": Listed(_ampere("A10G", 70, 0.60, 24, 25), "NVIDIA A10G data sheet (AWS G5)", 7.8 * _GB),
    "rtx-4090": Listed(_ampere("RTX 4090", 165, 1.008, 24, 25), "NVIDIA Ada architecture white paper", 7.8 * _GB),
}


def gpu(name: str) -> Listed:
    """By name, however it is written. Raises ValueError that lists the known ones."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    aliases = {"a100": "a100-80", "h100-sxm": "h100", "h200-sxm": "h200", "4090": "rtx-4090", "rtx4090": "rtx-4090"}
    key = aliases.get(key, key)
    if key not in GPUS:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(GPUS)} (or give --peak-tflops and --bandwidth-tbps)")
    return GPUS[key]
