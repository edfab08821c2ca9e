"""Attention over paged KV behind one interface, chosen by device."""

from __future__ import annotations

import importlib.util

import torch

from workers.attention.base import Attention, Layout, make_layout, token_positions
from workers.attention.widened import WidenedAttention

__all__ = [
    "Attention",
    "Layout",
    "check_page_size",
    "choose_backend",
    "make_attention",
    "make_layout",
    "token_positions",
]

PAGE_SIZE = {"cpu": 16, "cuda": 256}
"""Tokens of a KV block where nothing else is asked for. The CUDA kernels take multiples of theirs."""


def check_page_size(block_size: int, device: str) -> None:
    """Raises ValueError for a block size that the device's kernels do not take."""
    if device.startswith("cuda") and block_size % PAGE_SIZE["cuda"]:
        raise ValueError(f"block size {block_size} is not possible on {device}; take a multiple of {PAGE_SIZE['cuda']}")


def choose_backend(name: str, device: str) -> str:
    """`auto` is cpu on a CPU, and on CUDA flash_attn where the package is installed, else varlen. Imports none of them.

    Raises ValueError for a backend that does not run on the device or is not installed.
    """
    on_cuda = device.startswith("cuda")
    if name == "auto":
        return "cpu" if not on_cuda else "flash_attn" if _has_flash_attn() else "varlen"
    if (name == "cpu") == on_cuda:
        raise ValueError(f"--attention {name} does not run on {device}")
    if name == "flash_attn" and not _has_flash_attn():
        raise ValueError("the flash-attn package is not installed; install it or take --attention varlen")
    return name


def make_attention(
    name: str, device: str, compute: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> Attention:
    """The backend of `choose_backend`, which see. `kv_dtype` is what the pages hold, if not what is computed in."""
    name = choose_backend(name, device)
    if name == "cpu":
        from workers.attention.cpu import CpuAttention

        return CpuAttention(kv_dtype or compute)
    kernel = _cuda_attention(name)
    return kernel if kv_dtype in (None, compute) else WidenedAttention(kernel)


def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _cuda_attention(name: str) -> Attention:
    if name == "varlen":
        from workers.attention.varlen import VarlenAttention

        return VarlenAttention()
    if name == "flash_attn":
        from workers.attention.flash import FlashAttention

        return FlashAttention()
    raise ValueError(f"unknown attention backend {name!r}; choose one of auto, cpu, flash_attn, varlen")
