"""The client handle of a script, and of everything that runs no event loop of its own.

from cluster.client import Cluster

with Cluster.start(model="smollm2") as cluster:
    for text in cluster.stream("Once upon a time", max_tokens=40):
        print(text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import ray

from cluster.async_cluster import DEFAULT_NAME, NAMESPACE, AsyncCluster
from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.local_ray import connect_ray
from cluster.scheduler_handle import Progress
from scheduler.request import Delta, Finish, Request
from scheduler.sampling import SamplingParams
from workers.tokenizer import Tokenizer

__all__ = ["AsyncCluster", "Cluster", "Generation"]

T = TypeVar("T")
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `finish` is stop, length, abort or error, and `reason` says more about it."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: str
    reason: str | None


class Cluster:
    """Serves a model, or attaches to one that is being served. A context manager; `shutdown` ends what it started."""

    def __init__(self, loop: _LoopThread, engine: AsyncCluster, tokenizer: Tokenizer, owns_ray: bool) -> None:
        self._loop = loop
        self._engine = engine
        self._tokenizer = tokenizer
        self._owns_ray = owns_ray
        self._closed = False

    @classmethod
    def start(
        cls,
        config: EngineConfig | None = None,
        *,
        address: str | None = None,
        name: str = DEFAULT_NAME,
        namespace: str = NAMESPACE,
        on_progress: Progress | None = None,
        **options: Any,
    ) -> Cluster:
        """Serve a model: `options` are EngineConfig's fields (model, tp, policy, ...).

        `address`: None starts a local Ray unless this process is connected already; `auto`, host:port or ray://... is
        an existing Ray cluster. Raises ValueError, in one line, for what cannot be served.
        """
        config = config or EngineConfig(**options)
        owns_ray = connect_ray(address)
        loop = _LoopThread()
        try:
            engine = loop.run(AsyncCluster.start(config, name=name, namespace=namespace, on_progress=on_progress))
            return cls(loop, engine, Tokenizer.load(engine.info.model_dir), owns_ray)
        except BaseException:
            loop.close()
            if owns_ray:
                ray.shutdown()
            raise

    @classmethod
    def connect(cls, address: str = "auto", *, name: str = DEFAULT_NAME, namespace: str = NAMESPACE) -> Cluster:
        """Attach to a served model on an existing Ray cluster. Raises EngineUnavailable where there is none."""
        owns_ray = connect_ray(address)
        loop = _LoopThread()
        try:
            engine = loop.run(AsyncCluster.connect(name, namespace=namespace))
            return cls(loop, engine, Tokenizer.load(engine.info.model_dir), owns_ray)
        except BaseException:
            loop.close()
            if owns_ray:
                ray.shutdown()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    # Generating.

    def generate(self, prompt: Prompt, *, request_id: str | None = None, **options: Any) -> Generation:
        """The whole answer. `options`: max_tokens (16), ignore_eos, and SamplingParams' fields (temperature, seed...).

        Raises RequestRefused, in one line, for what is not admitted, and EngineUnavailable where the engine fails.
        """
        request = self._request(prompt, request_id, options)
        return self._loop.run(self._collect(request))

    def stream(self, prompt: Prompt, *, request_id: str | None = None, **options: Any) -> Generator[str]:
        """Text as it comes. A caller that stops early ends the request."""
        request = self._request(prompt, request_id, options)
        pieces = self._pieces(request)
        try:
            while (piece := self._loop.run(_next(pieces))) is not None:
                yield piece
        finally:
            self._loop.run(pieces.aclose())

    async def agenerate(self, prompt: Prompt, *, request_id: str | None = None, **options: Any) -> AsyncGenerator[str]:
        """Text as it comes, for a caller with an event loop of its own."""
        pieces = self._pieces(self._request(prompt, request_id, options))
        try:
            while (piece := await asyncio.wrap_future(self._loop.submit(_next(pieces)))) is not None:
                yield piece
        finally:
            self._loop.submit(pieces.aclose())

    def abort(self, request_id: str) -> None:
        """End a request that was given this `request_id`; it leaves within an iteration."""
        self._loop.call(self._engine.abort, request_id)

    def stats(self) -> dict[str, Any]:
        return self._loop.run(self._engine.stats())

    def health(self, timeout_s: float = 30.0) -> None:
        """Return after a real forward on every group. Raises EngineUnavailable otherwise."""
        self._loop.run(self._engine.health(timeout_s))

    def configure(self, policy: str, chunk_size: int = 512) -> None:
        self._loop.run(self._engine.configure(policy, chunk_size))

    def shutdown(self) -> None:
        """End everything that this handle started. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.run(self._engine.close())
        self._loop.close()
        if self._owns_ray:
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def _request(self, prompt: Prompt, request_id: str | None, options: dict[str, Any]) -> Request:
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        max_tokens = options.pop("max_tokens", 16)
        stops = () if options.pop("ignore_eos", False) else self._tokenizer.eos_token_ids
        promise, slo_class = options.pop("promise", None), options.pop("slo_class", "")
        sampling = SamplingParams(**{"seed": secrets.randbits(63), **options})
        request = Request(request_id or uuid.uuid4().hex, tuple(tokens), max_tokens, sampling, tuple(stops))
        return replace(request, promise=promise, slo_class=slo_class)

    async def _collect(self, request: Request) -> Generation:
        tokens: list[int] = []
        last = Delta(request.request_id)
        async with aclosing(self._engine.generate(request)) as deltas:
            async for last in deltas:
                tokens += last.tokens
        finish = last.finish or Finish.ERROR
        return Generation(self._tokenizer.decode(tokens), tuple(tokens), len(request.prompt), finish.value, last.reason)

    async def _pieces(self, request: Request) -> AsyncGenerator[str]:
        detokenizer = self._tokenizer.detokenizer(request.prompt)
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                text = "".join(detokenizer.push(token) for token in delta.tokens)
                if delta.finish is not None:
                    text += detokenizer.flush()
                if text:
                    yield text


async def _next(pieces: AsyncGenerator[str]) -> str | None:
    return await anext(pieces, None)


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster-client", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: what was asked for is not wanted any more
            raise

    def call(self, function: Any, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
