"""Configuration of one serving application: what the command line, `serve run key=value` and scripts can set."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: object) -> object:
    """`2GiB`, `512M` or a plain number of bytes. Raises ValueError for anything else that is a string."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", value.strip().lower())
    if match is None:
        raise ValueError(f"{value!r} is no size; write it like 2GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
PolicyName = Literal["whole", "alternate", "chunked"]


class EngineConfig(BaseModel):
    """One model served by `groups` worker groups of `tp` ranks each under one central scheduler."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2"
    served_model_name: str | None = None
    tp: int = Field(1, ge=1)
    groups: int = Field(1, ge=1)
    policy: PolicyName = "chunked"
    chunk_size: int = Field(512, ge=1)
    max_batched_tokens: int = Field(8192, ge=1)
    max_running: int = Field(64, ge=1, le=4096)
    max_model_len: int | None = Field(None, ge=2)
    block_size: int | None = Field(None, ge=1)
    kv_memory: Bytes | None = None
    num_blocks: int | None = Field(None, ge=1)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    max_queued_requests: int = Field(1024, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: Literal["auto", "cpu", "flash_attn", "varlen"] = "auto"
    transport: Literal["auto", "compiled", "actor"] = "auto"
    threads: int | None = Field(None, ge=1)
    overlap: int = Field(1, ge=1, le=2)
