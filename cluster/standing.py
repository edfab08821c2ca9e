"""What an engine tells of itself: how far it is, what it is, whether requests can come, and what died."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.condition import why_not_ready
from cluster.engine import EngineInfo, EngineUnavailable
from cluster.loop import IterationLoop
from cluster.rebuild import LastingGroup

_READY = "ready"
_log = logging.getLogger(__name__)


class Standing:
    """Of one life of the scheduler's process, in which its engine may be started several times.

    `progress` says in a few words how far that is, `draining` why no more requests are taken, None where they are.
    """

    def __init__(self) -> None:
        self.progress = "starting"
        self.draining: str | None = None
        self._info: EngineInfo | None = None
        self._life = uuid.uuid4().hex
        self._restarts: list[str] = []

    def begin(self, before: EngineInfo | None) -> None:
        """It is being started. `before`: what was known of it in an earlier life of the process."""
        self.progress, self._info = "starting", before
        if before is not None and not self._restarts:  # a start that failed is tried again
            self._restarts.append("the scheduler died and was started again")
            _log.error("the scheduler died and was started again; front ends give it their requests again")

    def is_up(self, info: EngineInfo) -> None:
        self.progress, self._info = _READY, info

    def told_by(self, group: str) -> Callable[[str], None]:
        """For what a group says of its own start; `group` is put behind it."""

        def tell(what: str) -> None:
            if self.progress != _READY:  # or it is being rebuilt, which is told of elsewhere
                self.progress = what + group

        return tell

    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before everything is up."""
        if self._info is None or self.progress != _READY:
            raise EngineUnavailable(self.unavailable())
        return self._info

    def unavailable(self) -> str:
        return f"the engine is {self.progress}"

    def unless_known(self, revision: int) -> EngineInfo | None:
        """The engine's facts, where they are not those of that revision."""
        return None if self._info is None or self._info.revision == revision else self._info

    def hold(self, wanted: EngineInfo) -> EngineInfo:
        """The policy is that of `wanted` now."""
        info = self.info()
        self._info = replace(info, policy=wanted.policy, chunk_size=wanted.chunk_size, revision=wanted.revision)
        return self._info

    def incidents(self, groups: Sequence[LastingGroup]) -> tuple[str, list[str]]:
        """What died and what became of it since this process began, which has an id of its own."""
        return self._life, [*self._restarts, *(line for group in groups for line in group.incidents)]

    def why_not_ready(self, loops: Sequence[IterationLoop]) -> str:
        """Why a request that came now would be refused, or would have to wait; empty where neither."""
        if self.draining is not None:
            return self.draining
        return why_not_ready(loops) if self.progress == _READY else self.unavailable()
