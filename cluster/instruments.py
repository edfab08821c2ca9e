"""Everything that watches iterations: the figures, the decision log, and the cost model that learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import EngineConfig
from cluster.iteration_log import IterationLog
from cluster.loop import IterationRecord
from cluster.metrics import EngineMetrics
from cluster.transfers import Transfers
from cluster.tuning import Tuning
from scheduler.progress import Served
from scheduler.request import Delta


class Instruments:
    """One for an engine, whatever the number of its groups. Raises ValueError where the log cannot be written."""

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str,
        tuning: Tuning | None,
        tunings: Sequence[Tuning | None] = (),
    ) -> None:
        """`tunings` by group, where those are not all the same."""
        self.metrics = EngineMetrics(served_model_name, config.slo_classes)
        self.tuning, self._tunings = tuning, tunings
        self.transfers: Transfers | None = None
        if config.separated:
            self.transfers = Transfers(self.metrics.registry, {"model_name": served_model_name})
        try:
            self.log = IterationLog(config.iterations_kept, config.iteration_log)
        except OSError as error:
            raise ValueError(f"the iteration log cannot be written: {error}") from None

    def expose(self, groups: Sequence[dict[str, Any]]) -> bytes:
        """Prometheus text; `groups` are what their schedulers say of themselves."""
        return self.metrics.expose(groups, None if self.tuning is None else self.tuning.cost)

    def of(self, group: int) -> GroupInstruments:
        """The observer of that group's loop."""
        return GroupInstruments(self, group, self._tunings[group] if self._tunings else self.tuning)


@dataclass
class GroupInstruments:
    """Those of an engine, on the loop of one of its groups. `more` are called with each record, after the rest."""

    engine: Instruments
    group: int
    tuning: Tuning | None
    more: list[Callable[[IterationRecord], None]] = field(default_factory=list)

    def iteration(self, record: IterationRecord) -> None:
        if self.tuning is not None:
            self.tuning.observe(record)

    def afterwards(self, record: IterationRecord) -> None:
        self.engine.metrics.observe(record)
        transfers = self.engine.transfers
        self.engine.log.append(self.group, record, () if transfers is None else transfers.take_latest())
        for watch in self.more:
            watch(record)

    def ends(self, deltas: list[Delta], served: list[Served]) -> None:
        self.engine.metrics.observe_ends(deltas, served)
        self.engine.log.ended(deltas)
