"""The scheduler actor seen from outside: made, asked, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.config import EngineConfig
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.placement import remove_orphans
from cluster.recovery import in_words
from cluster.scheduler_actor import SchedulerActor
from cluster.subscribers import Unsubscribed
from cluster.transport import ENVIRONMENT

CONCURRENCY = 10_000
RESTARTING = "the scheduler died and is being started again"
Progress = Callable[[str], None]


def make_scheduler_actor(config: EngineConfig, name: str, namespace: str, *, detached: bool) -> ActorHandle[Any]:
    """The one of that name, where there is one. Ray starts it anew when its process dies.

    `detached`: it outlives the process that made it, and ends itself when nobody has subscribed for a while.
    """
    actor: Any = (
        ray.remote(SchedulerActor)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENCY,
            max_restarts=-1,
            runtime_env={"env_vars": ENVIRONMENT},
            name=name,
            namespace=namespace,
            **({"lifetime": "detached", "get_if_exists": True} if detached else {}),
        )
        .remote(config, name, namespace, detached)
    )
    return cast(ActorHandle[Any], actor)


async def started(scheduler: ActorHandle[Any], model_dir: Path, on_progress: Progress | None) -> EngineInfo:
    """Once its groups serve. Raises ValueError, in one line, for what cannot be served."""
    start = asyncio.ensure_future(asked(scheduler.start.remote(str(model_dir))))
    said = ""
    while not start.done():
        await asyncio.wait([start], timeout=0.5)
        if on_progress is not None and not start.done():
            with suppress(RayError, TimeoutError):
                now = str(await asyncio.wait_for(asked(scheduler.progress.remote()), 5))
                if now != said:
                    on_progress(now)
                    said = now
    return cast(EngineInfo, start.result())


async def end(scheduler: ActorHandle[Any]) -> None:
    """In order where it answers, by force in any case."""
    with suppress(RayError, TimeoutError, EngineUnavailable, ValueError):
        await asyncio.wait_for(asked(scheduler.close.remote()), 8)
    with suppress(RayError):
        ray.kill(scheduler)
    with suppress(RayError, ConnectionError):
        await asyncio.to_thread(remove_orphans)


async def asked(answer: Any) -> Any:
    """An actor's answer. ValueError and EngineUnavailable of the actor are raised as such, its death as the latter."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, ValueError | EngineUnavailable):
            raise type(error.cause)(str(error.cause)) from None
        raise
    except RayActorError as error:
        raise EngineUnavailable(gone(error)) from None


def why_away(error: Exception) -> str | None:
    """Why a scheduler that is to come back is not there now. None where it is, and has merely forgotten who asked."""
    if isinstance(error, RayActorError):
        return RESTARTING
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, Unsubscribed):
        return None
    return str(cause) if isinstance(cause, EngineUnavailable) else in_words(error)


def gone(error: RayActorError) -> str:
    """Whether for good or for now, in one line."""
    if isinstance(error, ActorUnavailableError):
        return RESTARTING
    return f"the scheduler is gone: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
