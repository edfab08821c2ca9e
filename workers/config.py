"""What a worker rank is told at its start. Plain data, so that a process without Ray can build one by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """`model_dir` is a local directory in Hugging Face layout (`workers.checkpoint.resolve` gives one).

    device: auto | cpu | cuda. dtype: auto (float32 on CPU, the checkpoint's on CUDA) | float32 | bfloat16 | float16.
    kv_dtype: auto (the same) | float32 | bfloat16 | float16 | fp8 | int8. attention: auto | cpu | flash_attn | varlen.
    block_size None: 16 on CPU, 256 on CUDA (flash kernels' page size). threads None: the CPUs of this machine divided
    by the ranks on it. alone_on_host: all ranks of this group, and no others of the engine, are on one machine, so that
    threads may keep to processors (`workers.processors`). `max_batched_tokens`: of one iteration, for which memory is
    set aside. `rendezvous` is torch.distributed's init method (tcp://host:port), needed where world_size > 1.
    """

    model_dir: str
    rank: int = 0
    world_size: int = 1
    rendezvous: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    attention: str = "auto"
    block_size: int | None = None
    threads: int | None = None
    alone_on_host: bool = False
    max_model_len: int | None = None
    max_running: int = 64
    max_batched_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a rank says of itself after loading; printed at start, and what the KV pool is sized from.

    The bytes are this rank's own (its shard of the heads). `kv_reading_bytes_per_block`: what reading a block takes
    besides, where its kernel wants another type than pages hold. `free_bytes` is memory that may go
    to KV: free device memory on CUDA, available host memory on CPU. `host_free_bytes`: the latter on either.
    `iteration_bytes`: what the largest iteration takes besides.
    """

    rank: int
    device: str
    dtype: str
    kv_dtype: str
    attention: str
    collectives: str
    block_size: int
    max_model_len: int
    vocab_size: int
    layers: int
    query_heads: int
    kv_heads: int
    weight_bytes: int
    kv_bytes_per_block: int
    kv_reading_bytes_per_block: int
    free_bytes: int
    host_free_bytes: int
    iteration_bytes: int
    threads: int
    pid: int
