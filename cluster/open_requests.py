"""What a front end knows of its open requests: enough to give each of them again to a scheduler that knows nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler.request import Delta, Finish, Request


@dataclass(slots=True)
class OpenRequest:
    """`seen` are tokens that have reached the front end. `admitted`: a scheduler had it. `ending`: it was asked to."""

    request: Request
    opened: float
    seen: list[int] = field(default_factory=list)
    admitted: bool = False
    ending: Finish | None = None


class OpenRequests:
    """On one event loop. Whatever has been seen is not produced again."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request) -> None:
        self._open[request.request_id] = OpenRequest(request, time.monotonic())

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def admitted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if opened := self._open.get(request_id):
                opened.admitted = True

    def ends(self, request_id: str, finish: Finish) -> None:
        """Its end has been asked for."""
        if opened := self._open.get(request_id):
            opened.ending = finish

    def see(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if opened := self._open.get(delta.request_id):
                opened.admitted = True  # though the answer that says so may still be on its way
                opened.seen.extend(delta.tokens)
                if delta.grant is not None:
                    opened.request = replace(opened.request, promise=delta.grant.promise)
                if delta.finish is not None:
                    self.close(delta.request_id)

    def take_ended(self) -> list[Delta]:
        """The last deltas of those that were to end, for which no scheduler is needed."""
        deltas = [Delta(name, finish=opened.ending) for name, opened in self._open.items() if opened.ending is not None]
        for delta in deltas:
            self.close(delta.request_id)
        return deltas

    def again(self) -> tuple[list[Request], list[Request]]:
        """All of them in the order in which they came: those that a scheduler had admitted, and those that none had."""
        opened = self._open.values()
        return [_rest(o) for o in opened if o.admitted], [_rest(o) for o in opened if not o.admitted]


def _rest(opened: OpenRequest) -> Request:
    request = opened.request
    age = request.age_s + time.monotonic() - opened.opened
    return replace(request, produced=(*request.produced, *opened.seen), age_s=age)
