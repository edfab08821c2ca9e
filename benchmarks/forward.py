"""How close a forward comes to what the processor can do: decode, prefill, and the two in one.

    python -m benchmarks.forward [--rounds 7] [--json]

One worker in this process, the embedded model. In each round everything is measured in turn, and what is compared is
compared within the round; the medians of the rounds' ratios are printed, with the absolute values beside them.

* decode: a step of 8 and of 32 streams at a context of 128, against reading as many bytes as the weights have.
* prefill: 2,048 tokens in one chunk, in chunks of 256 and of 128, against the matrix products alone: the same packed
  layers on the same numbers of rows, with no attention, norm or sampling in between. Once by time, and once by
  operations per second, of which attention has a third as many as the products: at their rate and with nothing else to
  do, a prefill would take 1.30 times as long as they, which by time is a ratio of 0.77. Counted is what is computed: of
  the last layer, what nobody samples from is not.
* mixed: 8 decodes and a chunk of 64 in one forward, against the chunk alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.command import run_rounds
from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.sampling import SamplingParams
from workers.checkpoint import resolve
from workers.config import WorkerConfig
from workers.worker import Worker

GREEDY = SamplingParams(temperature=0.0)
CONTEXT, PROMPT, CHUNK = 128, 2048, 64
SLOTS = 33
"""32 streams and the prompt."""
LAYERS, HEADS, HEAD_DIM, INNER = 30, 9, 64, 1536
HIDDEN = HEADS * HEAD_DIM
OF_PRODUCTS = 2 * 106_168_320 * PROMPT
"""Operations: two for each of the layers' weights and each token."""
OF_LAST_LAYER = 2 * HIDDEN * (HIDDEN + 3 * INNER) * (PROMPT - 1)
"""Of them those behind the last layer's attention, which all tokens but the last one are spared."""


def operations(chunk: int) -> float:
    """Of a prefill, over OF_PRODUCTS. Attention has two products of HEAD_DIM for each head, query and key that it sees;
    the last layer has it of the last chunk alone."""
    pairs, before = (n * (n + 1) // 2 for n in (PROMPT, PROMPT - chunk))
    attention = 4 * HIDDEN * (LAYERS * pairs - before)
    return 1 + (attention - OF_LAST_LAYER) / OF_PRODUCTS


@dataclass(frozen=True)
class Measure:
    """A ratio of two times of one round, and what it should be at most (or, a share, at least)."""

    name: str
    target: float
    at_most: bool
    of: str
    to: str
    scale: float = 1.0

    def value(self, seconds: dict[str, float]) -> float:
        return self.scale * seconds[self.of] / seconds[self.to]

    def holds(self, value: float) -> bool:
        return value <= self.target if self.at_most else value >= self.target


def prefill(how: str, chunk: int, target: float) -> tuple[Measure, Measure]:
    """Against the products' time, and against their rate."""
    both = f"products {chunk}", f"prefill {chunk}"
    return (
        Measure(f"prefill, {how}: products' time / its time", target, False, *both),
        Measure(f"prefill, {how}: its operations/s / products'", target, False, *both, operations(chunk)),
    )


MEASURES = (
    Measure("decode step of 8 streams / reading the weights", 1.8, True, "decode 8", "read"),
    Measure("decode step of 32 streams / reading the weights", 3.2, True, "decode 32", "read"),
    *prefill("2,048 at once", PROMPT, 0.8),
    *prefill("chunks of 256", 256, 0.7),
    *prefill("chunks of 128", 128, 0.7),
    Measure("8 decodes and a chunk of 64 / the chunk alone", 1.25, True, "mixed", "chunk"),
)


class Bench:
    """Slots 0 .. 31 decode from a context of CONTEXT again and again; slot 32 is prefilled."""

    def __init__(self, config: WorkerConfig | None = None) -> None:
        self.worker = Worker(config or WorkerConfig(str(resolve("smollm2")), max_running=SLOTS))
        self.worker.load()
        self.size = self.worker.block_size
        self.own_blocks = -(-(PROMPT + CHUNK) // self.size)
        self.worker.allocate(SLOTS * self.own_blocks)
        self.weights = torch.randn(self.worker.model.bytes_read // 4)
        self._iteration = 0

    def seconds(self) -> dict[str, float]:
        """One round: seconds of everything."""
        found = {"read": timed(lambda: self.weights.sum())}
        for streams in (8, 32):
            self.fill(range(streams), CONTEXT)
            found[f"decode {streams}"] = self.decode(streams)
            self.empty(range(streams))
        for chunk in (PROMPT, 256, 128):
            found[f"products {chunk}"] = timed(lambda rows=chunk: self.products(rows))
            found[f"prefill {chunk}"] = self.prefill(chunk)
        found |= self.mixed()
        return found

    def decode(self, streams: int) -> float:
        """The median of some steps."""
        return statistics.median(self.run(Forward(tuple(range(streams)))) for _ in range(5))

    def prefill(self, chunk: int) -> float:
        self.fill([32], PROMPT, computed=0)
        spans = range(0, PROMPT, chunk)
        spent = sum(self.run(Forward(chunks=(self.segment(32, at, chunk, at + chunk == PROMPT),))) for at in spans)
        self.empty([32])
        return spent

    def mixed(self) -> dict[str, float]:
        """A chunk in the middle of a prompt, with decodes beside it and without."""
        self.fill(range(8), CONTEXT)
        decodes = tuple(range(8))
        spent: dict[str, list[float]] = {"mixed": [], "chunk": []}
        for _ in range(3):
            for name, along in (("mixed", decodes), ("chunk", ())):
                self.fill([32], PROMPT, computed=256)
                spent[name].append(self.run(Forward(along, (self.segment(32, 256, CHUNK, False),))))
                self.empty([32])
        self.empty(range(8))
        return {name: statistics.median(values) for name, values in spent.items()}

    @torch.inference_mode()
    def products(self, rows: int) -> None:
        """Every layer's matrices on `rows` rows, as often as a prompt of PROMPT tokens takes, and the head on one."""
        model = self.worker.model
        for _ in range(PROMPT // rows):
            for layer in model.layers:
                for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                    linear(torch.ones(rows, linear.in_features))
        model.head(torch.ones(1, model.head.in_features))

    # Plans.

    def fill(self, slots: Iterable[int], tokens: int, computed: int | None = None) -> None:
        """Admit a sequence to each slot and compute its first `computed` tokens (None: all, and sample one)."""
        for slot in slots:
            self._plan(admissions=(Admission(slot, tuple(range(1000, 1000 + tokens)), tokens, GREEDY),))
            if count := tokens if computed is None else computed:
                self.run(Forward(chunks=(self.segment(slot, 0, count, computed is None),)))

    def empty(self, slots: Iterable[int]) -> None:
        self._plan(releases=tuple(slots))

    def segment(self, slot: int, start: int, count: int, sample: bool) -> Segment:
        """With all the blocks that the slot may need, the first time."""
        first = slot * self.own_blocks
        return Segment(slot, start, count, tuple(range(first, first + self.own_blocks)) if start == 0 else (), sample)

    def run(self, forward: Forward) -> float:
        return self._plan(forwards=(forward,))

    def _plan(self, **parts: object) -> float:
        self._iteration += 1
        plan = IterationPlan(self._iteration, **{"forwards": (), **parts})  # type: ignore[arg-type]
        return sum(self.worker.execute(plan).forward_s)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(rounds: int) -> dict[str, Any]:
    bench = Bench()
    bench.seconds()  # whatever is done for the first time
    taken = [bench.seconds() for _ in range(rounds)]
    rows = []
    for m in MEASURES:
        value = statistics.median(m.value(seconds) for seconds in taken)
        both = {name: statistics.median(seconds[name] for seconds in taken) for name in (m.of, m.to)}
        rows.append(
            {
                "measure": m.name,
                "ratio": round(value, 3),
                "target": f"{'at most' if m.at_most else 'at least'} {m.target:g}",
                "holds": m.holds(value),
                "ms": [round(1e3 * both[m.of], 1), round(1e3 * both[m.to], 1)],
            }
        )
    return {"threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        ms = " / ".join(f"{value:,.1f}" for value in row["ms"])
        print(
            f"{row['measure']:<58}{row['ratio']:>7.3f}  {row['target']:<14}{'' if row['holds'] else 'MISSED':<8}{ms} ms"
        )


if __name__ == "__main__":
    run_rounds(__doc__, 7, measure, show)
