"""Configurations on real workers, each served over HTTP by an application of its own on one Ray Serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from cluster.config import EngineConfig
from cluster.workloads import ClosedLoop, PlannedRequest, RandomPrompt, Workload
from deploy import running
from deploy.bench import loop
from deploy.bench.drive import drive
from deploy.bench.monitor import Watcher
from deploy.bench.record import RunRecord
from deploy.bench.slo import SloTargets
from deploy.bench.target import Target
from deploy.compare.ground import Say, Seen, Session, Step, Transfers
from deploy.compare.promised import targets_of
from deploy.compare.resources import Resources

WARM_UP_PROMPT, WARM_UP_OUTPUT = 512, 8
WARM_UP_REQUESTS = 3
"""Of each group."""
STEPS = 10_000
"""Of the decision log, at most: what a run had before that is not drawn."""
Result = TypeVar("Result")


class ServedGround:
    """On a Ray Serve that listens at `address`. `on_thread` runs what takes long and must not hold up a signal."""

    def __init__(
        self,
        address: running.Address,
        say: Say = lambda line: None,
        on_thread: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self._address, self._say, self._on_thread = address, say, on_thread

    @contextmanager
    def open(self, config: EngineConfig) -> Iterator[Session]:
        """Raises CommandError where it cannot be served. Whoever is interrupted ends Serve as a whole."""
        try:
            server = self._on_thread(lambda: self._start(config))
            yield ServedSession(config, server)
        except Exception:
            self._on_thread(running.undeploy)
            raise
        self._on_thread(running.undeploy)

    def _start(self, config: EngineConfig) -> running.Server:
        running.check(config)
        return running.deploy(config, self._address, say=self._say)


class ServedSession:
    def __init__(self, config: EngineConfig, server: running.Server) -> None:
        self._config, self._server = config, server

    @property
    def resources(self) -> Resources:
        return Resources.of(self._config, self._server.info)

    @property
    def pinned(self) -> dict[str, Any]:
        return {"num_blocks": self._server.info.num_blocks, "block_size": self._server.info.block_size}

    @property
    def facts(self) -> dict[str, str]:
        info = self._server.info
        return {"model": info.served_model_name, "device": info.device, "dtype": info.dtype,
                "attention": info.attention, "transport": info.transport}  # fmt: skip

    def promise(self, prompt_tokens: int) -> SloTargets:
        (promise,) = self._server.promises([prompt_tokens])
        if promise is None:  # not measured: what the operator said is all there is
            asked = (self._config.ttft_ms, self._config.tpot_ms, self._config.tbt_ms)
            return SloTargets(*(None if value is None else value / 1e3 for value in asked))
        return targets_of(promise)

    def warm_up(self, load: Workload) -> None:
        """First calls compile and allocate: a few requests for each group, as long as the load's up to a bound."""
        longest = max(request.prompt_tokens or WARM_UP_PROMPT for request in load.requests)
        groups = sum(of.count for of in self.resources.groups)
        count, tokens = WARM_UP_REQUESTS * groups, min(longest, WARM_UP_PROMPT)
        plans = [PlannedRequest(RandomPrompt(tokens, f"warm-up/{n}"), WARM_UP_OUTPUT) for n in range(count)]
        loop.run(drive(self._target("warm-up"), ClosedLoop(plans, groups)))

    def run(self, load: Workload, salt: str, watch: Watcher) -> Seen:
        record = loop.run(drive(self._target(salt), load, progress=watch))
        entries = during(self._logged(), record)
        steps = tuple(_step(entry, record.started_at) for entry in entries)
        return Seen(record, steps, transfers(entries, record.started_at) if self._config.separated else None)

    def _target(self, salt: str) -> Target:
        return Target(self._server.address.url, extra={"cache_salt": salt})

    def _logged(self) -> list[dict[str, Any]]:
        """The decision log; empty where it is not kept."""
        asked = {"after": -1, "limit": min(STEPS, max(1, self._config.iterations_kept))}
        url = f"{self._server.address.url}/v1/stallfree/iterations"
        try:
            answer = httpx.get(url, params=asked, timeout=60, trust_env=False).raise_for_status()
            return list(answer.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError):
            return []


def during(entries: list[dict[str, Any]], record: RunRecord) -> list[dict[str, Any]]:
    """Iterations that fall into the run."""
    start, end = record.started_at * 1e3, (record.started_at + record.duration_s) * 1e3
    return [entry for entry in entries if entry["start_ms"] < end and entry["start_ms"] + entry["actual_ms"] > start]


def transfers(entries: list[dict[str, Any]], started_at: float) -> Transfers:
    """Of KV that arrived meanwhile: the log tells them with the iteration after which they were known."""
    moved = [each for entry in entries for each in entry.get("transfers", ())]
    spans = ((begun / 1e3 - started_at, ended / 1e3 - started_at) for each in moved for begun, ended in each["sends"])
    return Transfers(tuple(each["send_ms"] / 1e3 for each in moved), sum(each["bytes"] for each in moved), tuple(spans))


def _step(entry: dict[str, Any], started_at: float) -> Step:
    start = entry["start_ms"] / 1e3 - started_at
    return Step(entry["group"], start, start + entry["actual_ms"] / 1e3, entry["prefill_tokens"], entry["decodes"])
