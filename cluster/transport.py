"""How a plan gets to every rank and its result back: a compiled graph, or plain actor calls, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from ray.actor import ActorHandle
from ray.dag import InputNode, MultiOutputNode

MOST_UNDER_WAY = 4

ENVIRONMENT = {"RAY_CGRAPH_get_timeout": "86400", "RAY_CGRAPH_submit_timeout": "86400"}
"""For the process that drives a compiled graph: a long prompt is no reason to give a rank up, and a dead one is noticed
without any time-out."""


class Transport(Protocol):
    """`send` raises what Ray raises for a rank that died or failed."""

    name: ClassVar[str]

    async def send(self, plan: bytes) -> bytes:
        """To every rank; the first rank's answer, once all have answered."""

    async def close(self) -> None: ...


class CompiledTransport:
    """Ray's compiled graph: shared-memory channels set up once, no scheduling and no object store on the way."""

    name: ClassVar[str] = "compiled"

    def __init__(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        with InputNode() as plan:
            graph = MultiOutputNode([rank.execute.bind(plan) for rank in ranks])
        self._graph: Any = graph.experimental_compile(enable_asyncio=True, _max_inflight_executions=MOST_UNDER_WAY)

    async def send(self, plan: bytes) -> bytes:
        answers = await asyncio.gather(*await self._graph.execute_async(plan))
        first: bytes = answers[0]
        return first

    async def close(self) -> None:
        await asyncio.to_thread(self._graph.teardown)


class ActorTransport:
    """Plain actor calls, in the order in which they are made."""

    name: ClassVar[str] = "actor"

    def __init__(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        self._ranks = ranks

    async def send(self, plan: bytes) -> bytes:
        answers: list[bytes] = await asyncio.gather(*(rank.execute.remote(plan) for rank in self._ranks))
        return answers[0]

    async def close(self) -> None:
        pass


def make_transport(name: str, ranks: Sequence[ActorHandle[Any]], device: str) -> Transport:
    """`auto` is compiled on CUDA where that can be set up, and plain calls on a CPU.

    A compiled graph saves about 2 ms a step, but its readers turn in a loop while they wait, busy or idle: about half
    a hardware thread for the scheduler and as much for every rank (measured with Ray 2.60). Beside a GPU that is a fair
    price; on a CPU those threads are the ones that compute. Raises what Ray raises where `compiled` was asked for and
    cannot be had.
    """
    if name == "actor" or (name == "auto" and not device.startswith("cuda")):
        return ActorTransport(ranks)
    try:
        return CompiledTransport(ranks)
    except Exception:
        if name == "compiled":
            raise
        return ActorTransport(ranks)
