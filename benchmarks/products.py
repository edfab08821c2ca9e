"""The products of a forward by this project's kernel and by oneDNN, which is torch's, each with its weights reordered.

    python -m benchmarks.products [--rounds 9] [--json]

The matrices of the embedded model's 30 layers, at several numbers of rows. In each round both sides go through all of
them in turn, and each matrix is one of its own: nothing is in the caches from the layer before. The medians of the
rounds' ratios are printed, with the absolute values beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import run_rounds
from workers.packed import Packed

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""[out, in] of a layer: queries, keys and values; the way back; gate and up; down."""
ROWS = (1, 8, 16, 32, 64, 136, 512, 2048)
LAID_OUT_FOR = 64
"""Rows, as oneDNN asks when it reorders a weight."""

Product = Callable[[Tensor], Tensor]


def by_onednn(weight: Tensor) -> Product:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, LAID_OUT_FOR)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def seconds(products: list[tuple[int, Product]], rows: int) -> float:
    inputs = {inner: torch.ones(rows, inner) for _, inner in SHAPES}
    started = time.perf_counter()
    for inner, product in products:
        product(inputs[inner])
    return time.perf_counter() - started


@torch.inference_mode()
def measure(rounds: int) -> dict[str, Any]:
    weights = [torch.randn(shape) for _ in range(LAYERS) for shape in SHAPES]
    ours: list[tuple[int, Product]] = [(weight.shape[1], Packed(weight).multiply) for weight in weights]
    onednn = [(weight.shape[1], by_onednn(weight)) for weight in weights]
    rows = []
    for count in ROWS:
        for side in (ours, onednn):
            seconds(side, count)  # whatever is done for the first time
        taken = [(seconds(ours, count), seconds(onednn, count)) for _ in range(rounds)]
        rows.append(
            {
                "rows": count,
                "ratio": round(statistics.median(mine / other for mine, other in taken), 3),
                "ours_ms": round(1e3 * statistics.median(mine for mine, _ in taken), 2),
                "onednn_ms": round(1e3 * statistics.median(other for _, other in taken), 2),
            }
        )
    return {"threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}


def show(result: dict[str, Any]) -> None:
    print(f"{result['threads']} threads; {'rows':>6}{'ours / oneDNN':>15}{'ms':>20}")
    for row in result["rows"]:
        print(f"{row['rows']:>17}{row['ratio']:>15.3f}{row['ours_ms']:>11.2f} / {row['onednn_ms']:.2f}")


if __name__ == "__main__":
    run_rounds(__doc__, 9, measure, show)
