"""DistServe (OSDI 2024): separated groups against colocated ones, under the cost model of its authors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.publications.held import capacity_of, engine, machine_of, told, with_ratios
from benchmarks.publications.loads import by_rate, drawn
from benchmarks.publications.options import Options, Row
from cluster.simulated.capacity import Criterion
from scheduler.budget import Batch
from scheduler.policies import Mix
from scheduler.policies.whole import WholePolicy
from scheduler.roofline import Features, ModelShape


@dataclass(frozen=True, slots=True)
class FittedByOthers:
    """DistServe's cost model: milliseconds of a prefill a + b tokens + c (sum of squared lengths), of decodes
    a + b context + c requests with other constants from `many` requests on.

    Its engine never mixes the two; an iteration that does is given one intercept, the larger, and both slopes.
    """

    prefill: tuple[float, float, float]
    few: tuple[float, float, float]
    lots: tuple[float, float, float]
    many: int = 95

    def predict(self, f: Features) -> float:
        a, b, c = self.prefill
        squares = 2 * f.chunk_pairs - f.prefill_tokens  # for a whole prompt its length squared; a chunk has its history
        prompts = (a, b * f.prefill_tokens + c * squares) if f.chunks else (0.0, 0.0)
        a, b, c = self.few if f.decodes < self.many else self.lots
        streams = (a, b * f.decode_context + c * f.decodes) if f.decodes else (0.0, 0.0)
        return (max(prompts[0], streams[0]) + prompts[1] + streams[1]) / 1e3


OPT_13B = ModelShape("OPT-13B", 12_850_000_000, 40, 5120, 40, 40, 128, vocab=50272)
OPT_66B = ModelShape("OPT-66B", 65_700_000_000, 64, 9216, 72, 72, 128, vocab=50272)
OPT_13B_COST = FittedByOthers(
    (18.1025, 0.101912, 7.12226e-6), (19.9347, 6.26936e-4, 0.038507), (7.16619, 5.79800e-4, 0.158311)
)
OPT_66B_TP4_COST = FittedByOthers(
    (29.4416, 0.151352, 8.31745e-6), (30.7603, 4.51948e-4, 0.0632842), (27.4708, 4.04685e-4, 0.124807)
)
"""From DistServe's repository (LLMServe/DistServe, Apache-2.0), fitted by its authors on A100-80."""


class PromptsFirst(WholePolicy):
    """As the vLLM that DistServe was measured against: streams have a token when no prompt waits any more."""

    name: ClassVar[str] = "prompts first"

    def compose(self, batch: Batch) -> list[Mix]:
        return super().compose(Batch(batch.prefills, [], batch.now) if batch.prefills else batch)


MOST_TOGETHER = 2048
"""Tokens of prompts that share an iteration there, unless a single one is longer."""
DIVISIONS = ((1, 1), (2, 1), (3, 1), (1, 2))
"""Groups that prefill and that decode: the authors choose these, too, for each load."""


def distserve(options: Options) -> Iterator[Row]:
    """What each GPU carries of groups that do everything, and of groups that are divided, at 90 % attainment."""
    chat = drawn("lognormal:600:0.8", "lognormal:150:0.8", 2048)
    long = drawn("lognormal:1650:0.15", "lognormal:75:0.6", 2048)
    settings = (
        ("13B, 512 + 64 tokens", OPT_13B, OPT_13B_COST, 1, [(512, 64)], 0.4, 0.04),
        ("13B chat", OPT_13B, OPT_13B_COST, 1, chat, 0.25, 0.1),
        ("66B chat", OPT_66B, OPT_66B_TP4_COST, 4, chat, 2.5, 0.15),
        ("66B summarisation", OPT_66B, OPT_66B_TP4_COST, 4, long, 15.0, 0.15),
    )
    for name, shape, cost, tp, pairs, ttft, tpot in settings:
        ways: list[tuple[str, str, int, Row]] = [
            ("prompts first", "whole", 2, {}),
            ("whole", "whole", 2, {}),
            ("chunked 512", "chunked", 2, {}),
            ("slo", "slo", 2, {}),
        ]
        for prefill, decode in DIVISIONS:
            apart = {"mode": "separated", "prefill_groups": prefill, "decode_groups": decode, "prefill_policy": "whole"}
            ways += [(f"separated {prefill}:{decode}", "chunked", prefill + decode, apart)]
        found = []
        for way, policy, groups, more in ways:
            slo = {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * tpot}
            config = engine(shape.name, policy, tp=tp, block_size=16, **slo, **(more or {"groups": groups}))
            machine, load = machine_of(config, shape, cost), by_rate(pairs, options)
            own = (lambda config: PromptsFirst(MOST_TOGETHER)) if way == PromptsFirst.name else None
            held = capacity_of(config, machine, load, Criterion(0.9), options.seeds, own)
            gpus, row = groups * tp, told(held)
            found.append({"setting": name, "policy": way, "GPUs": gpus, **row, "rate": round(row["rate"] / gpus, 3)})
        yield from with_ratios(found, PromptsFirst.name)
