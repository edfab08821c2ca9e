"""The Ray Serve application: one deployment that owns the engine, one that answers HTTP.

    serve run deploy.app:build_app model=smollm2 policy=chunked chunk_size=128
    serve deploy deploy/serve.yaml

The engine outlives every replica: its scheduler actor is detached, and has a name that belongs to the application. An
`Engine` replica that Serve starts in the place of one that died takes it over; one that is deleted ends it, and an
engine that nobody has subscribed to for a minute ends itself. Each `Api` replica attaches to the scheduler actor once,
in its constructor, and not in a request: Serve cancels what a request's handler has started when that request ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.client import AsyncCluster
from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.precedence import step_back
from deploy.api import ApiSettings, create_api
from deploy.api.keys import read_keys
from workers.checkpoint import resolve
from workers.tokenizer import Tokenizer

NAMESPACE = "stallfree"
"""Ray namespace of the scheduler actor."""
CLOSE_S = 20.0
"""For a replica to end after its requests have; Serve's own default."""
SECRET = frozenset({"api_keys"})
"""Arguments whose value is not repeated: it may be a key where a hash was meant."""


class ServeArgs(EngineConfig, ApiSettings):
    """Everything that can be set: the engine, the API's limits, and how many API replicas there are.

    `max_ongoing_requests` bounds the open requests of a replica; a stream is one as long as it lasts. `api_key_file` is
    read where the application is built, and its keys added to `api_keys`.
    """

    replicas: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=4096, ge=1)
    api_key_file: Path | None = None
    drain_seconds: float = Field(default=2.0, ge=0, le=86_400, allow_inf_nan=False)
    """How long running requests may go on when the application is deleted or replaced."""

    def part(self, model: type[BaseModel]) -> dict[str, Any]:
        """Those of the arguments that are fields of `model`."""
        return {name: getattr(self, name) for name in model.model_fields}


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for arguments as `serve run` gives them, all of them strings, or a configuration file.

    Raises ValueError, in one line, for an unknown argument or a value that is not allowed.
    """
    given = parse_args(args)
    config = EngineConfig(**given.part(EngineConfig))
    settings = ApiSettings(**given.part(ApiSettings))
    if given.api_key_file is not None:
        keys = (*settings.api_keys, *read_keys(given.api_key_file))
        settings = settings.model_copy(update={"api_keys": keys})
    shutdown_s = given.drain_seconds + CLOSE_S
    name = f"scheduler-{uuid.uuid4().hex[:12]}"
    engines = Engine.options(graceful_shutdown_timeout_s=shutdown_s)  # type: ignore[attr-defined]
    engine = engines.bind(config, name, given.drain_seconds)
    api = Api.options(  # type: ignore[attr-defined]
        num_replicas=given.replicas,
        max_ongoing_requests=given.max_ongoing_requests,
        graceful_shutdown_timeout_s=shutdown_s,
    )
    application: serve.Application = api.bind(engine, settings)
    return application


def parse_args(args: Mapping[str, Any]) -> ServeArgs:
    """Raises ValueError, in one line, that names the argument."""
    try:
        return ServeArgs(**args)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "arguments"
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(ServeArgs.model_fields))
            raise ValueError(f"unknown argument {name!r}; there are: {known}") from None
        said = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several arguments together
            raise ValueError(said) from None
        got = "" if first["loc"][0] in SECRET else f" (got {first['input']!r})"
        raise ValueError(f"{name}: {said[:1].lower()}{said[1:]}{got}") from None


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=64,
    health_check_period_s=5,
    ray_actor_options={"num_cpus": 0},
)
class Engine:
    """Starts the scheduler actor `name` with its worker groups, or takes it over where it runs already."""

    async def __init__(self, config: EngineConfig, name: str, drain_seconds: float) -> None:  # type: ignore[misc]
        self._name, self._drain_seconds = name, drain_seconds
        self._cluster = await AsyncCluster.start(config, name=name, namespace=NAMESPACE, detached=True)
        if self._cluster.info.device == "cpu":
            step_back()

    async def scheduler(self) -> tuple[str, str]:
        """Name and namespace of the scheduler actor, for `AsyncCluster.connect`."""
        return self._name, NAMESPACE

    async def info(self) -> EngineInfo:
        return self._cluster.info

    async def stats(self) -> dict[str, Any]:
        return await self._cluster.stats()

    async def configure(self, policy: str, chunk_size: int) -> None:
        """Change the policy between two iterations. Raises ValueError for an unknown one."""
        await self._cluster.configure(policy, chunk_size)

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose engine cannot serve any more."""
        await _check_standing(self._cluster)

    async def __del__(self) -> None:
        if cluster := getattr(self, "_cluster", None):
            with suppress(Exception):  # whatever state it is in, it goes
                await cluster.drain("the application is being replaced", self._drain_seconds)
            await cluster.close()


@serve.deployment(health_check_period_s=5, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Api:
    """One HTTP replica. Serve asks it for its ASGI app once it is constructed."""

    async def __init__(self, engine: DeploymentHandle[Engine], settings: ApiSettings) -> None:  # type: ignore[misc]
        name, namespace = await engine.scheduler.remote()
        self._cluster = await AsyncCluster.connect(name, namespace=namespace)
        tokenizer = await asyncio.to_thread(_load_tokenizer, self._cluster)
        self._app = create_api(self._cluster, tokenizer, settings, answer_ids=False)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that has lost its engine; the new one finds the new engine."""
        await _check_standing(self._cluster)

    async def __del__(self) -> None:
        if cluster := getattr(self, "_cluster", None):
            await cluster.close()


def _load_tokenizer(cluster: AsyncCluster) -> Tokenizer:
    """From the directory that the workers read, or on a machine that does not have it, from where the model comes."""
    directory = Path(cluster.info.model_dir)
    return Tokenizer.load(directory if directory.is_dir() else resolve(cluster.info.model))


async def _check_standing(cluster: AsyncCluster) -> None:
    """Raises EngineUnavailable once no worker group is left, or no scheduler. One that is being started again is no
    reason to give connections up, and no forward is asked for: a long one is no fault."""
    cluster.standing()
    if cluster.away is not None:
        return
    stats = await cluster.stats()
    if stats["given_up"]:
        raise EngineUnavailable(stats["given_up"])
