"""Configuration of one serving application: what the command line, `serve run key=value` and scripts can set."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from scheduler.gate import OnInfeasible
from scheduler.policies import PrefillOrder
from scheduler.slo import LONGEST_PROMISE_S, OWN_CLASSES, SHORTEST_PROMISE_S, Promise

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: object) -> object:
    """`2GiB`, `512M` or a plain number of bytes. Raises ValueError for anything else that is a string."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", value.strip().lower())
    if match is None:
        raise ValueError(f"{value!r} is no size; write it like 2GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_classes(value: object) -> object:
    """From a command line: `name=factor` or `name=ttft:tpot[:tbt]` in milliseconds, with commas between several."""
    if not isinstance(value, str):
        return value
    classes: dict[str, object] = {}
    keys = ("ttft_ms", "tpot_ms", "tbt_ms")
    for part in filter(None, value.split(",")):
        name, equals, numbers = part.partition("=")
        name, fields = name.strip(), numbers.split(":")
        if not equals or not name or len(fields) > len(keys):
            raise ValueError(f"{part!r} is no class; write name=factor or name=ttft_ms:tpot_ms[:tbt_ms]")
        if name in classes:
            raise ValueError(f"the class {name!r} is there twice")
        classes[name] = fields[0] if len(fields) == 1 else dict(zip(keys, fields, strict=False))
    return classes


Milliseconds = Annotated[float, Field(ge=SHORTEST_PROMISE_S * 1e3, le=LONGEST_PROMISE_S * 1e3, allow_inf_nan=False)]


class SloPromise(BaseModel):
    """A promise as people write it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: Milliseconds
    tpot_ms: Milliseconds
    tbt_ms: Milliseconds | None = None

    def promise(self) -> Promise:
        return Promise(self.ttft_ms / 1e3, self.tpot_ms / 1e3, None if self.tbt_ms is None else self.tbt_ms / 1e3)


Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


def _not_reserved(classes: dict[str, Any]) -> dict[str, Any]:
    for name in classes:
        if name in OWN_CLASSES:
            raise ValueError(f"the name {name!r} is reserved; choose another for this class")
    return classes


SloClasses = Annotated[dict[str, Factor | SloPromise], BeforeValidator(parse_classes), AfterValidator(_not_reserved)]
"""Classes of service by name: a factor on the default promise, or a promise of its own."""


def _not_blank(name: str) -> str:
    if not name.strip():
        raise ValueError("a name is needed")
    return name


Name = Annotated[str, AfterValidator(_not_blank)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=2**60)]
PolicyName = Literal["whole", "alternate", "chunked", "slo"]


SEPARATED_ONLY = ("prefill_groups", "decode_groups", "prefill_tp", "decode_tp", "prefill_policy")
"""Fields that mean nothing where every group prefills and decodes."""


def default_classes() -> dict[str, float | SloPromise]:
    return {"interactive": 1.0, "batch": 10.0}


class EngineConfig(BaseModel):
    """One model served by worker groups of `tp` ranks each under one central scheduler.

    mode colocated: `groups` groups, each of which prefills and decodes. separated: `prefill_groups` that compute
    prompts and hand their KV over to one of `decode_groups`; `prefill_tp`, `decode_tp` and `prefill_policy` default to
    `tp` and `policy`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Name = "smollm2"
    served_model_name: Name | None = None
    tp: int = Field(default=1, ge=1)
    groups: int = Field(default=1, ge=1)
    mode: Literal["colocated", "separated"] = "colocated"
    prefill_groups: int = Field(default=1, ge=1)
    decode_groups: int = Field(default=1, ge=1)
    prefill_tp: int | None = Field(default=None, ge=1)
    decode_tp: int | None = Field(default=None, ge=1)
    policy: PolicyName = "slo"
    prefill_policy: PolicyName | None = None
    chunk_size: int = Field(default=512, ge=1)
    max_batched_tokens: int = Field(default=8192, ge=1)
    max_running: int = Field(default=64, ge=1, le=4096)
    max_model_len: int | None = Field(default=None, ge=2)
    block_size: int | None = Field(default=None, ge=1)
    kv_memory: Bytes | None = None
    num_blocks: int | None = Field(default=None, ge=1, le=2**40)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    prefix_caching: bool = True
    preempt: Literal["recompute", "swap"] = "recompute"
    swap_memory: Bytes | None = None
    max_queued_requests: int = Field(default=1024, ge=1)
    max_queued_tokens: int = Field(default=2**21, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    attention: Literal["auto", "cpu", "flash_attn", "varlen"] = "auto"
    transport: Literal["auto", "compiled", "socket", "actor"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    overlap: int = Field(default=1, ge=1, le=2)
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    tbt_ms: Milliseconds | None = None
    slo_classes: SloClasses = Field(default_factory=default_classes)
    on_infeasible: OnInfeasible = "best-effort"
    prefill_order: PrefillOrder = "deadline"
    profile_seconds: float = Field(default=15.0, ge=0, le=600)
    """How long iterations are measured at the start, where nothing is known of machine and model; 0: not at all."""
    hang_seconds: float = Field(default=30.0, gt=0, le=86_400, allow_inf_nan=False)
    """How much longer than predicted an iteration may take before its workers are taken for hung and replaced."""
    iterations_kept: int = Field(default=4096, ge=0, le=1_000_000)
    iteration_log: Annotated[str, AfterValidator(os.path.abspath)] | None = None

    @property
    def separated(self) -> bool:
        return self.mode == "separated"

    @property
    def group_count(self) -> int:
        """Groups of all roles."""
        return self.prefill_groups + self.decode_groups if self.separated else self.groups

    @property
    def highest_tp(self) -> int:
        """Ranks of the largest group."""
        return max(self.prefill_tp or self.tp, self.decode_tp or self.tp) if self.separated else self.tp

    @model_validator(mode="after")
    def _pool_is_sized_once(self) -> EngineConfig:
        if self.kv_memory is not None and self.num_blocks is not None:
            raise ValueError("--kv-memory and --num-blocks both say how large the KV pool is; choose one")
        return self

    @model_validator(mode="after")
    def _swap_is_possible(self) -> EngineConfig:
        if self.swap_memory is not None and self.preempt != "swap":
            raise ValueError("--swap-memory needs --preempt swap")
        return self

    @model_validator(mode="after")
    def _of_one_mode(self) -> EngineConfig:
        foreign = ("groups",) if self.separated else SEPARATED_ONLY
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].default:
                flag = "--" + name.replace("_", "-")
                if self.separated:
                    raise ValueError(f"{flag} is for --mode colocated; give --prefill-groups and --decode-groups")
                raise ValueError(f"{flag} needs --mode separated")
        return self
