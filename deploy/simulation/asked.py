"""One call of `stallfree simulate`: what is simulated under which load, from the options as given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import EngineConfig
from cluster.simulated.machine import Machine, by_calibration, by_hardware
from cluster.workloads import OpenLoop, PlannedRequest, Workload
from deploy.bench.slo import SloTargets
from deploy.bench.wanted import Wanted, description
from deploy.described import bytes_of, gpu_of, shape_of
from deploy.simulation.lengths import Pair, read_lengths
from deploy.simulation.load import load_by_rate, load_of, stream_of_load
from scheduler.roofline import ModelShape


@dataclass(frozen=True, slots=True)
class Asked:
    """`formats` of weights and KV; `peaks` are TFLOP/s, TB/s, GB and GB/s of a link for a GPU not in the table. Methods
    raise ValueError, in one line, for what cannot be."""

    config: EngineConfig
    gpu: str | None
    formats: tuple[str, str]
    peaks: tuple[float | None, float | None, float | None, float]
    calibration: Path | None
    workload: str
    wanted: Wanted
    lengths: Path | None
    noise: float
    seed: int

    def shape(self) -> ModelShape:
        return shape_of(self.config.model, bytes_of(self.formats[0]), bytes_of(self.formats[1]))

    def machine(self) -> Machine:
        if self.calibration is None:
            return by_hardware(self.config, self.shape(), gpu_of(self.gpu, *self.peaks).hardware)
        if self.gpu is not None:
            raise ValueError("--calibration has been measured on a machine of its own; leave out --gpu")
        return by_calibration(self.config, self.calibration)

    def load(self) -> Workload:
        return load_of(self.workload, self.wanted, self.seed, self.table())

    def stream(self) -> Iterator[PlannedRequest]:
        return stream_of_load(self.workload, self.wanted, self.seed, self.table())

    def by_rate(self) -> Callable[[float, int], OpenLoop]:
        return load_by_rate(self.workload, self.wanted, self.wanted.duration or 120.0, self.table())

    def table(self) -> list[Pair]:
        return [] if self.lengths is None else read_lengths(self.lengths)

    def slo(self) -> SloTargets:
        """What the verdicts of a report go by; nothing where nothing was asked for."""
        asked = (self.config.ttft_ms, self.config.tpot_ms, self.config.tbt_ms)
        return SloTargets(*(None if value is None else value / 1e3 for value in asked))

    def facts(self) -> dict[str, Any]:
        """To be kept with the figures."""
        config = self.config
        on = f"{config.group_count * config.tp} x {self.gpu or 'GPU by flags'}"
        return {
            "model": config.model,
            "url": "a calibrated engine (simulated)" if self.calibration else f"{on} (simulated)",
            **{name: getattr(config, name) for name in ("policy", "chunk_size", "tp", *_groups(config), "max_running")},
            "weights": self.formats[0],
            "kv": self.formats[1],
            "noise": self.noise,
            "ttft_ms": config.ttft_ms,
            "tpot_ms": config.tpot_ms,
            "tbt_ms": config.tbt_ms,
            **({} if self.lengths is None else {"lengths": str(self.lengths)}),
            **description(self.workload, self.wanted, self.seed),
        }


def _groups(config: EngineConfig) -> tuple[str, ...]:
    return ("mode", "prefill_groups", "decode_groups") if config.separated else ("groups",)
