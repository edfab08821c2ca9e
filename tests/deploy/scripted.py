"""An engine that says what a test wants it to say, one delta at a time. The model has no part in these tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from cluster.engine import EngineInfo
from scheduler.request import Delta, Finish, Request

Script = Callable[[Request], AsyncGenerator[Delta]]


class ScriptedEngine:
    """`script(request)` yields the deltas. Requests and aborts are recorded."""

    def __init__(self, script: Script, **facts: Any) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.failure: Exception | None = None
        self.info = EngineInfo(
            **{
                "model": "scripted", "model_dir": "", "served_model_name": "scripted", "max_model_len": 512,
                "vocab_size": 49152, "block_size": 16, "num_blocks": 64, "tp": 1, "groups": 1, "policy": "chunked",
                "chunk_size": 64, "device": "cpu", "dtype": "float32", "attention": "cpu", "transport": "none", **facts,
            }
        )  # fmt: skip

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        self.requests.append(request)
        async for delta in self.script(request):
            yield delta

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> dict[str, Any]:
        return {}

    async def iterations(self, after: int, limit: int) -> list[dict[str, Any]]:
        return []

    async def metrics(self) -> bytes:
        if self.failure:
            raise self.failure
        return b"scripted 1\n"

    async def health(self, timeout_s: float) -> None:
        if self.failure:
            raise self.failure

    async def configure(self, policy: str, chunk_size: int) -> None:
        raise ValueError("a script has no policy")


def saying(tokens: Sequence[int], finish: Finish = Finish.LENGTH, reason: str | None = None) -> Script:
    """One delta per token; the last one finishes."""

    async def script(request: Request) -> AsyncGenerator[Delta]:
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            yield Delta(request.request_id, (token,), finish=finish if last else None, reason=reason if last else None)
            await asyncio.sleep(0)

    return script


def raising(error: Exception, after: Sequence[int] = ()) -> Script:
    async def script(request: Request) -> AsyncGenerator[Delta]:
        for token in after:
            yield Delta(request.request_id, (token,))
        raise error

    return script
