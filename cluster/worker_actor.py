"""One rank as a Ray actor: a worker behind messages of bytes. Nothing it is sent is ever unpickled by us.

Who starts ranks imports this module too, and does without torch, which takes seconds to import: the rank's own process
does that, beginning the moment it is there.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import ray

from cluster.frames import FrameSocket
from cluster.orphans import end_with_raylet
from cluster.rank_process import RankProcess
from cluster.ray_facts import node_address
from scheduler.codec import decode_plan, encode_result
from workers.compute_thread import ComputeThread
from workers.config import WorkerConfig, WorkerDescription
from workers.deferred import META_KERNELS, defer
from workers.kv_orders import LinkConfig, SendOrder, SendReport
from workers.memory import give_back

if TYPE_CHECKING:
    from workers.worker import Worker

CONTROL = "control"
"""Concurrency group of the calls that are answered while a plan is being executed."""
KV = "kv"
"""That of KV leases and orders: one thread, so that they keep their order. None of them waits for another process."""
KV_REPORTS = "kv_reports"
"""That of the one call that waits for what was sent."""
PLANS = "plans"
"""That of the one call that serves a socket."""
PARK = b"park"
"""Sent in the place of a plan: wait, without turning, until `wake` is called. No plan begins with this byte."""
GIVES_BACK_AFTER_S = 1.0
"""Of waiting: what the largest iterations took, tens of MiB to hundreds, is the system's again then."""


class RankActor:
    """`execute` gets the bytes of a plan and answers with those of its result; every rank but the first with none."""

    def __init__(self, rank: int) -> None:
        end_with_raylet()
        self._rank = rank
        self._worker: Worker | None = None
        self._compute = ComputeThread()  # Ray may give each call to another thread
        self._imported = self._compute.submit(_worker_class, on_gpu=bool(ray.get_gpu_ids()))
        self._awake = threading.Event()

    def process(self) -> RankProcess:
        return RankProcess.own()

    def where(self) -> tuple[str, str, int]:
        """Node id, address, and a port that is free on it, for the group to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), node_address(), port

    def load(self, config: WorkerConfig, one_host: bool) -> WorkerDescription:
        """Raises ValueError, in one line, for what cannot be served."""
        if one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one host need no other network
        self._worker = self._imported.result()(config)
        return self._compute.run(self._worker.load)

    def allocate(self, num_blocks: int, swap_blocks: int) -> None:
        self._compute.run(self._ready().allocate, num_blocks, swap_blocks)

    def execute(self, plan: bytes) -> bytes:
        if plan == PARK:
            if not self._awake.wait(GIVES_BACK_AFTER_S):
                give_back()
                self._awake.wait()
            self._awake.clear()
            return b""
        return self._compute.run(self._answer, plan)

    @ray.method(concurrency_group=PLANS)
    def serve(self, path: str) -> None:
        """Execute the plans that come by a Unix socket, until its other end is closed, on the thread that computes: no
        other thread has to be woken for them. Raises what `execute` raises, and OSError."""
        self._compute.run(self._serve, path)

    def _serve(self, path: str) -> None:
        with closing(FrameSocket.connect(path)) as plans:
            while (plan := plans.receive()) is not None:
                plans.send(self._answer(plan))

    def _answer(self, plan: bytes) -> bytes:
        result = self._ready().execute(decode_plan(plan))
        return encode_result(result) if self._rank == 0 else b""

    def first(self, answer: bytes, *others: bytes) -> bytes:
        """The first rank's answer, once those of all ranks are there."""
        return answer

    @ray.method(concurrency_group=CONTROL)
    def wake(self) -> None:
        """Go on after a PARK, which may be still on its way."""
        self._awake.set()

    @ray.method(concurrency_group=CONTROL)
    def watch(self) -> None:
        """Never returns. Ray fails the call the moment this process dies, whatever its other calls wait for."""
        threading.Event().wait()

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> int:
        """The process id, from a rank that answers."""
        return os.getpid()

    @ray.method(concurrency_group=CONTROL)
    def give_back(self) -> None:
        """What iterations took is the system's again."""
        give_back()

    # Moving KV (`workers.kv_transfer`).

    @ray.method(concurrency_group=CONTROL)
    def kv_where(self) -> tuple[str, str]:
        """Node id and address."""
        return ray.get_runtime_context().get_node_id(), node_address()

    @ray.method(concurrency_group=KV)
    def kv_take_from(self, link: LinkConfig) -> int:
        """Listen for a sending rank. Returns the port."""
        return self._ready().transfer.take_from(link)

    @ray.method(concurrency_group=CONTROL)
    def kv_connect(self, link: LinkConfig, port: int) -> None:
        """Raises LinkError where nobody listens."""
        self._ready().transfer.connect(link, port)

    @ray.method(concurrency_group=KV)
    def kv_open(self, lease: int, blocks: tuple[int, ...]) -> None:
        self._ready().transfer.open(lease, blocks)

    @ray.method(concurrency_group=KV)
    def kv_send(self, order: SendOrder) -> None:
        self._ready().transfer.send(order)

    @ray.method(concurrency_group=KV)
    def kv_close(self, lease: int) -> None:
        self._ready().transfer.close(lease)

    @ray.method(concurrency_group=KV_REPORTS)
    def kv_reports(self, timeout_s: float) -> list[SendReport]:
        return self._ready().transfer.reports(timeout_s)

    def _ready(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("this rank has not been loaded")
        return self._worker


def _worker_class(on_gpu: bool) -> type[Worker]:
    if not on_gpu:
        defer(META_KERNELS)
    from workers.worker import Worker

    return Worker
