"""Where configurations are run: on real workers that are served, or on simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.config import EngineConfig
from cluster.workloads import Workload
from deploy.bench.monitor import Watcher
from deploy.bench.record import RunRecord
from deploy.bench.slo import SloTargets
from deploy.compare.resources import Resources


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of a group: seconds on the run's clock, and what was in it."""

    group: int
    start_s: float
    end_s: float
    prefill_tokens: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV that moved from prefill to decode groups: the seconds that each took, bytes in all, and when parts of it were
    on their way (from, to: seconds on the run's clock)."""

    seconds: tuple[float, ...]
    total_bytes: int
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """One run: what a client saw, and what only the engine knows. `steps` empty and `transfers` None: not told."""

    record: RunRecord
    steps: tuple[Step, ...] = ()
    transfers: Transfers | None = None


class Session(Protocol):
    """One configuration, up and ready."""

    @property
    def resources(self) -> Resources: ...

    @property
    def pinned(self) -> dict[str, Any]:
        """Fields of the configuration that the following ones are to have as they came out here: the KV pool."""

    @property
    def facts(self) -> dict[str, str]:
        """Of model and machine, for the report."""

    def promise(self, prompt_tokens: int) -> SloTargets:
        """What this engine promises by default for such a prompt; nothing where it was not measured."""

    def warm_up(self, load: Workload) -> None:
        """Whatever only happens the first time happens now."""

    def run(self, load: Workload, salt: str, watch: Watcher) -> Seen:
        """The load from its first request to the end of its last. No prompt finds another salt's prompts cached."""


class Ground(Protocol):
    def open(self, config: EngineConfig) -> AbstractContextManager[Session]:
        """A fresh engine. Raises CommandError or ValueError, in one line, where it cannot be started."""


Say = Callable[[str], None]
