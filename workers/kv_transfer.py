"""A rank's side of moving KV blocks to ranks of other groups, beside the forward. Knows no Ray.

Every link has a thread. What is read is copied under a lock, after a look whether its lease is still open, and only
then goes over the network; what has come is written in the same way. So a lease can be closed at any moment: from then
on nothing under it is read or written, whatever is on its way. A stale lease is refused, on both sides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from workers.kv_link import TAKER, Header, Link, LinkError, listen
from workers.kv_orders import STALE, LinkConfig, SendOrder, SendReport
from workers.kv_pages import Pages
from workers.parts import Part

MESSAGE_BYTES = 32 * 2**20
"""Most of one message: bounds memory beside the pages, and how long closing a lease may have to wait for a copy."""


@dataclass(slots=True)
class _Job:
    """An order on its way over its links."""

    order: SendOrder
    links_left: int
    started: float | None = None
    bytes: int = 0
    error: str = ""


@dataclass(slots=True)
class _Outgoing:
    """A link's queue and the thread that works it off."""

    link: Link | None
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    broken: str = ""


class KvTransfer:
    """`heads` are the KV heads of the model that this rank has, `device` where its pages are. Methods may be called
    from any thread; none but `connect` and `reports` waits for another process."""

    def __init__(self, pages: Pages, heads: Part, device: torch.device, clock: Callable[[], float]) -> None:
        self._pages, self._heads, self._device, self._clock = pages, heads, device, clock
        self._lock = threading.Lock()
        self._sending: set[int] = set()
        self._taking: dict[int, tuple[int, ...]] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._finished: queue.SimpleQueue[SendReport] = queue.SimpleQueue()

    # Links.

    def take_from(self, config: LinkConfig) -> int:
        """Listen for a sending rank, and take what it sends from then on. Returns the port."""
        store, port = listen(config.address)
        thread = threading.Thread(target=self._take, args=(config, store), name=f"kv-{config.name}", daemon=True)
        thread.start()
        return port

    def connect(self, config: LinkConfig, port: int) -> None:
        """Connect to a taking rank that listens. An older link of that name is given up. Raises LinkError."""
        outgoing = _Outgoing(Link.to_taker(config, port))
        with self._lock:
            older = self._outgoing.pop(config.name, None)
            self._outgoing[config.name] = outgoing
        if older is not None:
            older.jobs.put(None)
        thread = threading.Thread(target=self._send, args=(outgoing,), name=f"kv-{config.name}", daemon=True)
        thread.start()

    # Leases and orders.

    def open(self, lease: int, blocks: tuple[int, ...]) -> None:
        """Take what comes for that lease into these blocks."""
        with self._lock:
            self._taking[lease] = blocks

    def send(self, order: SendOrder) -> None:
        """Begin; what becomes of it is among the `reports`."""
        with self._lock:
            self._sending.add(order.number)
            outgoing = [self._outgoing.get(name) for name in order.links]
        job = _Job(order, len(order.links))
        if not outgoing or any(each is None or each.broken for each in outgoing):
            why = next((each.broken for each in outgoing if each is not None and each.broken), "there is no link")
            self._report(job, why)
            return
        for each in outgoing:
            assert each is not None  # looked at above
            each.jobs.put(job)

    def close(self, lease: int) -> None:
        """Once this returns, nothing is read or written any more under that lease (or the number of an order)."""
        with self._lock:  # a copy that is being made ends first
            self._sending.discard(lease)
            self._taking.pop(lease, None)

    def reports(self, timeout_s: float) -> list[SendReport]:
        """Those that came since the last call; waits for the first one."""
        found: list[SendReport] = []
        try:
            found.append(self._finished.get(timeout=timeout_s))
            while True:
                found.append(self._finished.get_nowait())
        except queue.Empty:
            return found

    def computed(self) -> None:
        """After each forward, by the thread that ran it."""
        self._pages.computed()

    # Sending.

    def _send(self, outgoing: _Outgoing) -> None:
        while (job := outgoing.jobs.get()) is not None:
            if not outgoing.broken and not job.error:
                try:
                    self._send_job(outgoing, job)
                except LinkError as error:
                    outgoing.broken = str(error)
            self._link_done(job, outgoing.broken)
        outgoing.link = None

    def _send_job(self, outgoing: _Outgoing, job: _Job) -> None:
        link, order = outgoing.link, job.order
        assert link is not None  # until its thread ends
        with self._lock:
            job.started = job.started if job.started is not None else self._clock()
        heads = link.config.heads
        local = Part(heads.start - self._heads.start, heads.stop - self._heads.start)
        step = max(1, MESSAGE_BYTES // self._pages.block_bytes(local.size))
        for start in range(0, len(order.blocks), step):
            blocks = order.blocks[start : start + step]
            with self._lock:
                stale = order.number not in self._sending
                content = None if stale else self._pages.read(blocks, local)
            if content is None or not link.send(
                Header(order.number, order.lease, order.first + start, len(blocks), content.numel()),
                content.cpu() if link.config.payload == "gloo" else content,
            ):
                with self._lock:
                    job.error = STALE
                return
            with self._lock:
                job.bytes += content.numel()

    def _link_done(self, job: _Job, broken: str) -> None:
        with self._lock:
            job.links_left -= 1
            job.error = job.error or broken
            last = job.links_left == 0
        if last:
            self._report(job, job.error)

    def _report(self, job: _Job, error: str) -> None:
        with self._lock:
            self._sending.discard(job.order.number)
        seconds = 0.0 if job.started is None else self._clock() - job.started
        self._finished.put(SendReport(job.order.number, job.bytes, seconds, error))

    # Taking.

    def _take(self, config: LinkConfig, store: Any) -> None:
        """Until the sender is gone."""
        local = Part(config.heads.start - self._heads.start, config.heads.stop - self._heads.start)
        try:
            link = Link(config, store, TAKER)
            while True:
                header = link.next_header()
                content = link.content(header.bytes, self._device)
                with self._lock:
                    blocks = self._taking.get(header.lease, ())[header.first : header.first + header.count]
                    fits = header.bytes == header.count * self._pages.block_bytes(local.size)
                    taken = len(blocks) == header.count and fits
                    if taken:
                        self._pages.write(blocks, local, content)
                link.answer(taken)
        except LinkError:
            return
