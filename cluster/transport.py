"""How a plan gets to every rank and its result back: a compiled graph, sockets, or plain actor calls, behind one
interface."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import ray
from ray.actor import ActorHandle
from ray.dag import InputNode
from ray.exceptions import RayChannelError, RayChannelTimeoutError
from ray.experimental.compiled_dag_ref import CompiledDAGRef

from cluster.recovery import in_words
from cluster.socket_transport import SocketTransport
from cluster.worker_actor import PARK

_log = logging.getLogger(__name__)

MOST_UNDER_WAY = 4
PARK_AFTER_S = 0.05
"""Longer than any pause between two iterations of a busy engine, and too short to be seen in a CPU's load."""
LOOK_EVERY_S = 0.001
LOOK_AT_RANKS_EVERY_S = 1.0
ASKED_WHY_S = 10.0
"""So long ranks have time to say why they left a channel that failed."""
FIRST_LOOK = 0.8
"""Nobody looks before this share of the shortest recent iteration is over."""

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
    """Ray's compiled graph: shared-memory channels set up once, no scheduling and no object store on the way.

    Whoever reads a channel turns in a loop until something comes (Ray 2.60), at the cost of a hardware thread for the
    driver and for every rank, busy or idle. So the driver looks whether the answer is there and sleeps in between, and
    ranks that have had nothing to do for a moment are parked: they wait inside `execute` until they are called.
    """

    name: ClassVar[str] = "compiled"

    def __init__(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        # Of a rank that died it would tell in four tracebacks, by itself and again when it is taken down.
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)
        with InputNode() as plan:
            answers = [rank.execute.bind(plan) for rank in ranks]
            # One output only: of several, a look that finds some but not all of them would lose those it found.
            answer: Any = answers[0] if len(ranks) == 1 else ranks[0].first.bind(*answers)
        self._graph: Any = answer.experimental_compile(_max_inflight_executions=MOST_UNDER_WAY)
        self._asked_nobody = _AskedNobody(self._graph)
        self._ranks: Sequence[ActorHandle[Any]] = ranks
        self._sent: int = 0
        self._under_way: int = 0
        self._parked: Any = None
        self._parking: asyncio.TimerHandle | None = None
        self._durations: deque[float] = deque(maxlen=32)

    async def send(self, plan: bytes) -> bytes:
        if self._parking is not None:
            self._parking.cancel()
        parked, self._parked = self._parked, None
        if parked is not None:
            self._wake()
        answer = self._write(plan)
        self._under_way += 1
        try:
            first = await self._read(answer, self._sent - 1)
        finally:
            self._under_way -= 1
        if parked is not None:
            parked.get(timeout=0)  # before this answer came that of the parking, which nobody wants
        if self._under_way == 0:
            self._parking = asyncio.get_running_loop().call_later(PARK_AFTER_S, self._park)
        return first

    async def close(self) -> None:
        if self._parking is not None:
            self._parking.cancel()
        if self._parked is not None:
            self._wake()
        await asyncio.to_thread(self._graph.teardown)

    def _write(self, plan: bytes) -> Any:
        answer = self._graph.execute(plan)
        answer._dag = self._asked_nobody
        self._sent += 1
        return answer

    async def _read(self, answer: Any, index: int) -> bytes:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(min(self._durations, default=0) * FIRST_LOOK)
        looked = clock()
        while True:
            if clock() > looked + LOOK_AT_RANKS_EVERY_S:
                looked = clock()
                self._look_at_ranks()
            try:
                first: bytes = answer.get(timeout=0)
            except RayChannelTimeoutError:
                answer = CompiledDAGRef(self._asked_nobody, index)  # one reference may be asked once
                await asyncio.sleep(LOOK_EVERY_S)
            except RayChannelError as error:
                raise await self._cause_of(error) from None
            else:
                self._durations.append(clock() - started)
                return first

    async def _cause_of(self, failed: RayChannelError) -> Exception:
        """Why a rank left its channels, where one says so; otherwise what failed was the channel."""
        ranks = asyncio.gather(*self._graph.worker_task_refs.values())
        try:
            await asyncio.wait_for(ranks, ASKED_WHY_S)
        except TimeoutError:
            return failed
        except Exception as error:
            return error
        return failed

    def _look_at_ranks(self) -> None:
        """Raises why a rank reads its channels no more, where one does not: its answer would be waited for in vain."""
        ended, _ = ray.wait(list(self._graph.worker_task_refs.values()), timeout=0)
        if ended:
            ray.get(ended[0])
            raise RuntimeError("a rank has left the channels of its compiled graph")

    def _park(self) -> None:
        self._parked = self._write(PARK)

    def _wake(self) -> None:
        for rank in self._ranks:
            rank.wake.remote()


class _AskedNobody:
    """A compiled graph as references to its answers see it. Where a channel fails they ask the ranks for the cause and
    wait for up to ten seconds, and the event loop with them (Ray 2.60): here there is nobody to ask."""

    worker_task_refs: ClassVar[dict[Any, Any]] = {}

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


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


async def make_transport(name: str, ranks: Sequence[ActorHandle[Any]], device: str, here: bool) -> Transport:
    """`auto` is compiled on CUDA where that can be set up, sockets where all ranks are `here`, on this process's node,
    and plain calls otherwise.

    On a CPU the ranks compute on the threads that a compiled graph's readers would turn on while they wait. What was
    asked for by its name has to be there: raises ValueError for sockets between nodes, ConnectionError where a rank
    does not come to its own, and what Ray raises for a compiled graph.
    """
    wanted = name if name != "auto" else "compiled" if device.startswith("cuda") else "socket" if here else "actor"
    if name == "socket" and not here:
        raise ValueError("plans can go by sockets only where all ranks are on the scheduler's node")
    try:
        if wanted == "compiled":
            return CompiledTransport(ranks)
        if wanted == "socket":
            return await SocketTransport.open(ranks)
    except Exception as error:  # whatever is missing on this machine
        if name != "auto":
            raise
        _log.warning("plans go by actor calls, for %s cannot be had: %s", wanted, in_words(error))
    return ActorTransport(ranks)
