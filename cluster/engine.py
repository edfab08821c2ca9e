"""What every engine offers to those who generate with it, whether it runs on Ray or in this process. No ray here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.outlook import Outlook
from scheduler.exchange import Role
from scheduler.request import Delta, Request


class EngineUnavailable(Exception):
    """The engine cannot serve now: it is starting, it failed, or it did not answer in time."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine that do not change while it runs, except the policy.

    `max_model_len` bounds prompt + generated tokens of a sequence; `num_blocks` x `block_size` tokens is the KV pool of
    one group.
    """

    model: str
    model_dir: str
    served_model_name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    tp: int
    groups: int
    policy: str
    chunk_size: int
    device: str
    dtype: str
    attention: str
    transport: str
    kv_dtype: str = "auto"
    swap_blocks: int = 0
    """Of host memory, for the KV of sequences that gave way."""
    iteration_bytes: int = 0
    """Memory of a group's largest iteration, besides weights and KV."""
    most_requests: int = 2**31
    """Sequences that can run and wait at once in all groups: more at once could never be admitted."""
    mode: str = "colocated"
    prefill_groups: int = 0
    decode_groups: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    """Groups that prefill alone and that decode alone, in separated mode, and the degrees of a prompt's and of a
    stream's group; `groups` counts all."""
    decode_blocks: int = 0
    """KV blocks of a decode group in separated mode; `num_blocks` is the least of all groups."""
    prefill_blocks: int = 0
    outlook: Outlook | None = None
    """What it can promise; None where its workers were not measured."""
    revision: int = 0
    """How often the policy was changed: of two, the greater is what holds."""

    def blocks_of(self, role: Role) -> int:
        """KV blocks of a group with that role."""
        return {"both": self.num_blocks, "prefill": self.prefill_blocks, "decode": self.decode_blocks}[role]


class Engine(Protocol):
    """The one interface between the API (or a script) and an engine.

    `generate` raises RequestRefused before its first delta where the request is not admitted, and EngineUnavailable
    where the engine fails; its last delta carries `finish`. A consumer that stops early (closes the iterator or is
    cancelled) has its request aborted, without awaiting anything. Methods are called from one event loop.
    """

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: Request) -> AsyncIterator[Delta]: ...

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """Ask for a request to be ended; it leaves within an iteration. Unknown ids are ignored. Never blocks.

        `stopped`: its reader found what was to stop it, so that it counts as complete.
        """

    async def stats(self) -> dict[str, Any]:
        """Figures now: running, waiting, blocks_free, blocks_total, iterations, policy, ... (see Scheduler.stats)."""

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The decision log (see IterationLog.entries)."""

    async def metrics(self) -> bytes:
        """Prometheus text exposition of the engine's figures."""

    async def health(self, timeout_s: float) -> None:
        """Return after a real forward on every group within `timeout_s`. Raises EngineUnavailable otherwise."""

    async def configure(self, policy: str, chunk_size: int) -> None:
        """Change the policy of a running engine, between two iterations. Raises ValueError for an unknown one."""
