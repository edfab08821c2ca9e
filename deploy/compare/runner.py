"""The comparison itself: one configuration after another, each on a fresh engine, under the same requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from deploy.bench.figures import figures
from deploy.bench.monitor import Watcher
from deploy.bench.record import Outcome
from deploy.bench.spread import Spread
from deploy.compare.comparison import Compared, Comparison, Load, Measured, Plan
from deploy.compare.ground import Ground, Say, Session
from deploy.compare.promised import Promises, lengths_of
from deploy.compare.resources import threads_of
from deploy.errors import one_line

WatchAs = Callable[[str], Watcher]
"""A watcher of one run, by what the run is called."""
STOPPED = "interrupted before it had ended"


def compare(
    plan: Plan, ground: Ground, *, say: Say = lambda line: None, watch: WatchAs = lambda name: lambda _: None
) -> Comparison:
    """Runs every configuration that can be run; what keeps one from it is told in its place. KeyboardInterrupt ends
    the comparison, which then has every load that had ended."""
    found = Comparison(plan)
    running = _Running(plan, ground, found, say, watch)
    try:
        for number, configuration in enumerate(plan.configurations, 1):
            compared = Compared(configuration)
            found.compared.append(compared)
            say(f"{configuration.name} ({number} of {len(plan.configurations)})")
            running.one(compared)
            if compared.failure is not None:
                say(f"{configuration.name}: {compared.failure}")
    except KeyboardInterrupt:
        give_up(found)
    found.warnings += _unequal(found)
    return found


class _Running:
    """What the configurations share: the promises and the KV pool of the first that came up."""

    def __init__(self, plan: Plan, ground: Ground, found: Comparison, say: Say, watch: WatchAs) -> None:
        self._plan, self._ground, self._found = plan, ground, found
        self._say, self._watch = say, watch
        self._salt = secrets.token_hex(8)
        self._promises: Promises | None = None
        self._pinned: dict[str, Any] = {"threads": threads_of(plan.base)}

    def one(self, compared: Compared) -> None:
        try:
            base = self._plan.base.model_copy(update=self._pinned)
            with self._ground.open(compared.configuration.engine(base)) as session:
                self._follow(compared, session)
        except Exception as error:  # of a configuration: the others are compared all the same
            compared.failure = one_line(str(error)) or type(error).__name__

    def _follow(self, compared: Compared, session: Session) -> None:
        if self._promises is None:
            lengths = set().union(*(lengths_of(load.workload) for load in self._plan.loads))
            self._promises = Promises.of(lengths, session.promise)
            self._pinned |= {**session.pinned, "kv_memory": None}  # a pool is sized in one way
            self._found.promised = self._promises.common
            self._found.ttft_by_length = self._promises.ttft_by_length
            self._found.facts = session.facts
        compared.resources = session.resources
        session.warm_up(self._plan.loads[0].workload)
        for load in self._plan.loads:
            name = f"{compared.name}, {load.name}" if load.name else compared.name
            measured = self._measure(name, session, load, self._promises)
            compared.runs.append(measured)
            run = measured.record
            self._say(f"{name}: {len(run.requests)} requests in {run.duration_s:.1f} s")

    def _measure(self, name: str, session: Session, load: Load, promises: Promises) -> Measured:
        seen = session.run(promises.asked_in(load.workload), f"{self._salt}/{name}", self._watch(name))
        run = promises.judging(seen.record)
        if run.requests and not any(record.outcome is Outcome.FINISHED for record in run.requests):
            errors = figures(run).errors
            raise RuntimeError(f"no request was served: {next(iter(errors), 'no answer')}")
        return Measured(
            load=load,
            record=run,
            figures=figures(run, promises.common),
            second_token=Spread.of(record.second_token_s for record in run.requests),
            steps=seen.steps,
            transfers=seen.transfers,
        )


def give_up(found: Comparison) -> None:
    """It was interrupted: what had not ended by then is told as such, and what had is kept."""
    found.interrupted = True
    for compared in found.compared:
        if compared.failure is None and len(compared.runs) < len(found.plan.loads):
            compared.failure = STOPPED
    left = found.plan.configurations[len(found.compared) :]
    found.compared += [Compared(configuration, failure=STOPPED) for configuration in left]


def _unequal(found: Comparison) -> list[str]:
    """Where resources differ after all, whoever reads the figures has to know."""
    had = {compared.name: compared.resources for compared in found.finished if compared.resources is not None}
    if len({resources.comparable for resources in had.values()}) <= 1:
        return []
    return ["resources differ: " + "; ".join(f"{name}: {resources.describe()}" for name, resources in had.items())]
