"""What is compared, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.config import EngineConfig
from cluster.workloads import OpenLoop, Workload
from deploy.bench.figures import Figures
from deploy.bench.record import RunRecord
from deploy.bench.slo import SloTargets
from deploy.bench.spread import Spread
from deploy.compare.configuration import Configuration
from deploy.compare.ground import Step, Transfers
from deploy.compare.resources import Resources


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, with what it is called where there are several."""

    name: str
    workload: Workload

    @property
    def offered_per_s(self) -> float | None:
        """Requests a second that are sent, whatever becomes of them; None where that is the server's doing."""
        requests = self.workload.requests
        if not isinstance(self.workload, OpenLoop) or len(requests) < 2 or requests[-1].at_s <= 0:
            return None
        return (len(requests) - 1) / requests[-1].at_s


@dataclass(frozen=True, slots=True)
class Plan:
    """`base` is colocated, and its ranks, threads and KV are what every configuration gets. `ttft_s`, `tpot_s` and
    `tbt_s` come from it as well, and from measurement where it leaves them open."""

    base: EngineConfig
    configurations: Sequence[Configuration]
    loads: Sequence[Load]

    def __post_init__(self) -> None:
        if not self.configurations or not self.loads:
            raise ValueError("a comparison needs configurations and a load")


@dataclass(frozen=True, slots=True)
class Measured:
    """One load under one configuration."""

    load: Load
    record: RunRecord
    figures: Figures
    second_token: Spread
    steps: tuple[Step, ...] = ()
    transfers: Transfers | None = None

    @property
    def transfer(self) -> Spread:
        return Spread.of(() if self.transfers is None else self.transfers.seconds)


@dataclass(slots=True)
class Compared:
    """One configuration. Either `runs` has one of each load, or `failure` says in a line why it was not run to its end;
    `runs` are then of the loads that had ended."""

    configuration: Configuration
    resources: Resources | None = None
    runs: list[Measured] = field(default_factory=list)
    failure: str | None = None

    @property
    def name(self) -> str:
        return self.configuration.name


@dataclass(slots=True)
class Comparison:
    """`promised` are what the verdicts go by, the same for all: numbers, of which TTFT is None where it depends on
    the prompt's length; those are in `ttft_by_length` (prompt tokens: seconds)."""

    plan: Plan
    compared: list[Compared] = field(default_factory=list)
    promised: SloTargets = field(default_factory=SloTargets)
    ttft_by_length: dict[int, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[Compared]:
        """To their end: what a verdict is about."""
        return [compared for compared in self.compared if compared.failure is None]

    @property
    def measured(self) -> list[Compared]:
        """Those that have any figures, of all loads or of some."""
        return [compared for compared in self.compared if compared.runs]
