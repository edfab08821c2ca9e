"""Configurations on GPUs that nobody here has, under the scheduler that serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.config import EngineConfig
from cluster.simulated.cluster import simulate
from cluster.simulated.machine import Machine, by_hardware
from cluster.tuning import promise_book
from cluster.workloads import PlannedRequest, Workload
from deploy.bench.monitor import Progress, Watcher
from deploy.bench.slo import SloTargets
from deploy.compare.ground import Ground, Seen, Session, Step, Transfers
from deploy.compare.promised import changed, targets_of
from deploy.compare.resources import Resources
from deploy.described import bytes_of, gpu_of, shape_of
from deploy.simulation.telling import as_run, loop_of
from scheduler.costmodel import OnlineCostModel
from scheduler.orders import Moved
from scheduler.roofline import Hardware, ModelShape


def simulated_on(gpu: str, base: EngineConfig, weights: str = "bf16", kv: str = "bf16") -> Ground:
    """On a GPU by its name in the table, with formats of weights and KV. Raises ValueError for what is not known."""
    shape = shape_of(base.model, bytes_of(weights), bytes_of(kv))
    return SimulatedGround(shape, gpu_of(gpu, None, None, None, 25).hardware)


class SimulatedGround:
    def __init__(self, shape: ModelShape, hardware: Hardware) -> None:
        self._shape, self._hardware = shape, hardware

    @contextmanager
    def open(self, config: EngineConfig) -> Iterator[Session]:
        """Raises ValueError where the model does not fit, and for what is not simulated."""
        yield SimulatedSession(config, by_hardware(config, self._shape, self._hardware), self._hardware.name)


class SimulatedSession:
    def __init__(self, config: EngineConfig, machine: Machine, gpu: str) -> None:
        self._config, self._machine, self._gpu = config, machine, gpu
        self._promises = promise_book(config, OnlineCostModel(machine.cost))

    @property
    def resources(self) -> Resources:
        of_gpu = Resources.of(self._config, self._machine.info)
        return Resources(of_gpu.groups, None, of_gpu.kv_tokens, f"{self._gpu} (simulated)")

    @property
    def pinned(self) -> dict[str, Any]:
        return {"num_blocks": self._machine.info.num_blocks, "block_size": self._machine.info.block_size}

    @property
    def facts(self) -> dict[str, str]:
        return {"model": self._machine.info.served_model_name, "device": f"{self._gpu} (simulated)"}

    def promise(self, prompt_tokens: int) -> SloTargets:
        promise = self._promises.promise(prompt_tokens)
        return targets_of(promise)

    def warm_up(self, load: Workload) -> None:
        """Nothing here is slower the first time."""

    def run(self, load: Workload, salt: str, watch: Watcher) -> Seen:
        """A simulated cluster is made anew for each load: it has nobody's prompts."""
        watch(Progress("run", planned=len(load.requests)))
        found = simulate(self._config, self._machine, changed(load, _without_body), keep_steps=True)
        record = as_run(found, {**self.facts, "url": "simulated", "loop": loop_of(load)})
        watch(Progress("run", planned=len(load.requests), finished=len(load.requests)))
        steps = (Step(s.group, s.started, s.ended, s.prefill_tokens, s.decodes) for s in found.steps)
        return Seen(record, tuple(steps), self._transfers(found.moved))

    def _transfers(self, moved: Sequence[Moved]) -> Transfers | None:
        if not self._config.separated:
            return None
        spans = tuple(span for move in moved for span in move.sends)
        return Transfers(tuple(move.send_s for move in moved), sum(move.bytes for move in moved), spans)


def _without_body(request: PlannedRequest) -> PlannedRequest:
    """There is no HTTP: the promise is the engine's default, which is where the request's came from."""
    return PlannedRequest(request.prompt, request.output_tokens, request.at_s, {}, request.kind)
