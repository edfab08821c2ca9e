"""Carries the orders of `scheduler.handoff` to the ranks, and their answers back: links, leases, what was sent.

A rank gets the calls for its leases one after another, in the order of the orders, so that none is read or written
after it was closed. Whatever a rank cannot do is an answer as well; that a group is gone, others notice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.recovery import in_words
from scheduler.handoff import Handoffs
from scheduler.orders import Close, Open, Order, Send
from workers.config import WorkerDescription
from workers.kv_orders import STALE, LinkConfig, SendOrder, SendReport, overlaps

_log = logging.getLogger(__name__)
POLL_S = 20.0
LINK_S = 120.0
LOOK_AFTER_S = 1.0
"""Without an answer to an order, those who have it are given something to compute: who hangs is then noticed as soon as
while it computes."""
ANSWER_S = 60.0
"""For a lease to be opened or closed, which takes no time: a rank that has not done it then is not there."""
Pair = tuple[int, int]
"""Sending and taking group."""


class RankGroup(Protocol):
    """What the carrier needs of a worker group. `ranks` are new ones after the group was rebuilt."""

    @property
    def ranks(self) -> Sequence[ActorHandle[Any]]: ...

    @property
    def descriptions(self) -> list[WorkerDescription]: ...


@dataclass(slots=True)
class _Sending:
    """An order, the ranks that have not reported, and what the others did."""

    order: Send
    left: int = 0
    reports: list[SendReport] = field(default_factory=list)
    submitted: bool = False


class Carrier:
    """`groups` by number; `settled` is called whenever the handoffs have got an answer, and `suspect` with a group that
    did not do what it was told: it may hang."""

    def __init__(
        self,
        groups: dict[int, RankGroup],
        handoffs: Handoffs,
        settled: Callable[[], None],
        suspect: Callable[[int], None],
    ) -> None:
        self._groups, self._handoffs, self._settled, self._suspect = groups, handoffs, settled, suspect
        self._links: dict[Pair, asyncio.Future[list[tuple[str, ...]]]] = {}
        self._sending: dict[int, _Sending] = {}
        self._listening: dict[int, list[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def carry(self, order: Order) -> None:
        """Begin. Returns at once; the calls of one group keep the order in which this was called."""
        if isinstance(order, Open):
            self._begin(self._open(order, self._ask(order.group, "kv_open", order.lease, order.blocks)))
        elif isinstance(order, Close):
            self._close(order)
        else:
            self._sending[order.number] = _Sending(order)
            self._begin(self._send(order))

    async def link_all(self, pairs: list[Pair]) -> None:
        """Make the links before there is anything to send. Raises what the ranks raise."""
        for pair in pairs:
            await self._link(pair)

    def forget(self, group: int) -> None:
        """Its ranks are gone, and so are the links to and from them."""
        for pair in [pair for pair in self._links if group in pair]:
            del self._links[pair]
        for task in self._listening.pop(group, []):
            task.cancel()
        for number, sending in list(self._sending.items()):
            if group in (sending.order.group, sending.order.target):
                del self._sending[number]
                self._handoffs.failed(number, "a group is gone")

    def close(self) -> None:
        for task in [*self._tasks, *itertools.chain(*self._listening.values())]:
            task.cancel()

    # Orders.

    async def _open(self, order: Open, answers: list[Any]) -> None:
        try:
            await self._answered(order.group, answers)
        except (RayError, TimeoutError) as error:
            self._suspect(order.group)
            self._handoffs.failed(order.lease, in_words(error))
        else:
            self._handoffs.opened(order.lease)

    def _close(self, order: Close) -> None:
        sending = self._sending.get(order.lease)
        if sending is not None and not sending.submitted:
            del self._sending[order.lease]  # its ranks have not heard of it, and never will
        self._begin(self._closed(order, self._ask(order.group, "kv_close", order.lease)))

    async def _closed(self, order: Close, answers: list[Any]) -> None:
        try:
            await self._answered(order.group, answers)
        except (RayError, TimeoutError):
            self._suspect(order.group)
            return  # the leases of a group that is gone end with it
        self._handoffs.closed(order.group, order.lease)

    async def _send(self, order: Send) -> None:
        try:
            links = await self._link((order.group, order.target))
        except (RayError, TimeoutError) as error:
            self._suspect(order.target)
            if self._sending.pop(order.number, None) is not None:
                self._handoffs.failed(order.number, in_words(error))
            return
        sending = self._sending.get(order.number)
        if sending is None:
            return  # it was closed meanwhile
        sending.submitted, sending.left = True, len(links)
        for rank, names in zip(self._groups[order.group].ranks, links, strict=True):
            rank.kv_send.remote(SendOrder(order.number, order.lease, order.first, order.blocks, names))
        asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._look_at, order)

    def _look_at(self, order: Send) -> None:
        if order.number in self._sending:
            self._suspect(order.group)
            self._suspect(order.target)

    def _report(self, report: SendReport) -> None:
        """Of one rank; the order is done when all of them have reported."""
        sending = self._sending.get(report.number)
        if sending is None:
            return
        sending.reports.append(report)
        if len(sending.reports) < sending.left:
            return
        del self._sending[report.number]
        order, errors = sending.order, [each.error for each in sending.reports if each.error]
        if any(error != STALE for error in errors):
            self._links.pop((order.group, order.target), None)  # made again for the next order
            self._suspect(order.target)
        if errors:
            _log.warning("KV from group %d to group %d: %s", order.group, order.target, errors[0])
            self._handoffs.failed(order.number, errors[0])
        else:
            seconds = max(each.seconds for each in sending.reports)
            self._handoffs.sent(order.number, sum(each.bytes for each in sending.reports), seconds)

    # Links.

    async def _link(self, pair: Pair) -> list[tuple[str, ...]]:
        """Names of the links of each sending rank, which are made where they are not there."""
        there = self._links.get(pair)
        if there is None:
            there = self._links[pair] = asyncio.ensure_future(self._make_links(pair))
        try:
            return await asyncio.shield(there)
        except BaseException:
            if self._links.get(pair) is there and there.done():
                del self._links[pair]
            raise

    async def _make_links(self, pair: Pair) -> list[tuple[str, ...]]:
        self._listen_to(pair[0])
        async with asyncio.timeout(LINK_S):
            return await self._linked(pair)

    async def _linked(self, pair: Pair) -> list[tuple[str, ...]]:
        source, target = (self._groups[group] for group in pair)
        senders, takers = source.ranks, target.ranks
        nodes: list[list[tuple[str, str]]] = [
            await asyncio.gather(*(rank.kv_where.remote() for rank in ranks)) for ranks in (senders, takers)
        ]
        heads = sum(rank.kv_heads for rank in source.descriptions)
        names: list[list[str]] = [[] for _ in senders]
        for s, t, part in overlaps(heads, len(senders), len(takers)):
            (here, own), (there, address) = nodes[0][s], nodes[1][t]
            one_host = here == there
            on_cuda = all(g.descriptions[r].device.startswith("cuda") for g, r in ((source, s), (target, t)))
            config = LinkConfig(
                name=f"{pair[0]}.{s}-{pair[1]}.{t}",
                heads=part,
                address="127.0.0.1" if one_host else address,
                own_address="127.0.0.1" if one_host else own,
                payload="nccl" if on_cuda else "gloo",
            )
            port = await takers[t].kv_take_from.remote(config)
            await senders[s].kv_connect.remote(config, port)
            names[s].append(config.name)
        return [tuple(each) for each in names]

    def _listen_to(self, group: int) -> None:
        if group not in self._listening:
            ranks = self._groups[group].ranks
            self._listening[group] = [asyncio.create_task(self._listen(group, rank)) for rank in ranks]

    async def _listen(self, group: int, rank: ActorHandle[Any]) -> None:
        while True:
            try:
                reports: list[SendReport] = await rank.kv_reports.remote(POLL_S)
            except RayError:
                return  # it is gone, which others notice
            for report in reports:
                self._report(report)
            if reports:
                self._settled()

    # In between.

    async def _answered(self, group: int, answers: list[Any]) -> None:
        """Returns when all ranks have answered. Raises what they raise, and TimeoutError after `ANSWER_S`."""
        answer = asyncio.gather(*answers)
        try:
            done, _ = await asyncio.wait({answer}, timeout=LOOK_AFTER_S)
            if not done:
                self._suspect(group)
            await asyncio.wait_for(answer, ANSWER_S)
        finally:
            answer.cancel()

    def _ask(self, group: int, method: str, *arguments: Any) -> list[Any]:
        return [getattr(rank, method).remote(*arguments) for rank in self._groups[group].ranks]

    def _begin(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._then_settle(what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _then_settle(self, what: Coroutine[Any, Any, None]) -> None:
        await what
        self._settled()
