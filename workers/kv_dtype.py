"""In what type keys and values are kept: the model's own, a narrower float, or codes of one byte with scales.

A code's scale belongs to one token and one head. It is final the moment the token is written, so that what is read back
depends neither on chunking nor on what else is in the block. A scale per block and head would be smaller, but it grows
with the block's largest value: codes would be written anew as the block fills, shared blocks included.
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_BYTES = torch.float32.itemsize
FP8_CAPABILITY = (8, 9)
"""Ada and Hopper are the first with conversions of this type in hardware."""


def choose_kv_dtype(name: str, compute: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the type that the model computes in. Raises ValueError for one that the device or the model has not."""
    if name == "auto":
        return compute
    if name not in KV_DTYPES:
        raise ValueError(f"unknown KV dtype {name!r}; choose one of auto, {', '.join(KV_DTYPES)}")
    dtype = KV_DTYPES[name]
    if name == "fp8" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY):
        raise ValueError(f"--kv-dtype fp8 is not possible on {device.type}: it takes a GPU of Ada, Hopper or later")
    if dtype.itemsize > compute.itemsize:
        raise ValueError(f"--kv-dtype {name} is wider than the {_name(compute)} that the model computes in")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """As it is chosen by."""
    return next((name for name, known in KV_DTYPES.items() if known == dtype), _name(dtype))


def has_scales(dtype: torch.dtype) -> bool:
    return dtype in LARGEST_CODE


def coded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [.., head_dim] -> codes of the same shape and float32 scales [..], whose product is nearest to the rows.

    What is not finite has a scale that is not finite either.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=-1).div_(LARGEST_CODE[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = wide / scales.unsqueeze(-1)
    if dtype == torch.int8:
        codes = codes.round_()
    largest = LARGEST_CODE[dtype]
    return codes.clamp_(-largest, largest).to(dtype), scales


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
