"""How well the roofline's terms follow measured operators, on models that they were not fitted to.

    python benchmarks/fidelity.py --data DIR [--json]

DIR holds operator profiles as the Vidur repository publishes them (github.com/microsoft/vidur, data/profiling; MIT):
any tree of CSV files, told apart by their columns, with the GPU's name somewhere in the path. Every error is the mean
absolute percentage error over the points of 1 to 4,096 tokens and TP degrees 1 to 8. Attention is fitted to every
eighth point and reported on the others: with the bandwidth that the linear layers achieve, with one of its own, and
without the waves of decodes.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.hardware import gpu
from scheduler.roofline import MATRIX_KERNELS, Features, Hardware, ModelShape, Roofline

GPUS = ("a100-80", "h100")
MOST_TOKENS = 4096
MATRICES = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
BUSY_CONTEXT = 8192
"""KV positions of a decode batch from which on reading them is what takes the time."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured operator of one layer on one rank: what it does, and the seconds that it took."""

    shape: ModelShape
    tp: int
    features: Features
    seconds: float


Law = Callable[[Hardware, Point], float]


def linear(hardware: Hardware, point: Point) -> float:
    terms = Roofline(point.shape, hardware, point.tp).terms(point.features)
    return terms.linear_s + MATRIX_KERNELS * hardware.kernel_s


def attention(hardware: Hardware, point: Point) -> float:
    return Roofline(point.shape, hardware, point.tp).terms(point.features).attention_s + hardware.attention_s


def error(law: Law, hardware: Hardware, points: Sequence[Point]) -> float:
    """MAPE in percent."""
    return 100 * statistics.fmean(abs(law(hardware, point) / point.seconds - 1) for point in points)


# Reading.


def median_of(row: dict[str, str], operator: str) -> float | None:
    """Seconds; the profiles have milliseconds."""
    text = row.get(f"time_stats.{operator}.median") or ""
    return float(text) / 1e3 if text else None


def layer_of(name: str, row: dict[str, str], heads: str, kv_heads: str, inner: int) -> ModelShape:
    hidden, query, kv = int(row["n_embd"]), int(row[heads]), int(row[kv_heads])
    head_dim = hidden // query
    parameters = hidden * head_dim * (2 * query + 2 * kv) + 3 * hidden * inner
    return ModelShape(name, parameters, 1, hidden, query, kv, head_dim)


def linear_points(name: str, rows: Iterable[dict[str, str]]) -> list[Point]:
    measured: dict[tuple[int, int], list[tuple[ModelShape, float]]] = defaultdict(list)
    for row in rows:
        times = [median_of(row, operator) for operator in MATRICES]
        tokens, tp = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        if tokens <= MOST_TOKENS and all(times):
            shape = layer_of(name, row, "n_head", "n_kv_head", int(row["n_expanded_embd"]))
            measured[tokens, tp].append((shape, sum(time or 0.0 for time in times)))
    return [
        Point(found[0][0], tp, Features(prefill_tokens=tokens), statistics.median(time for _, time in found))
        for (tokens, tp), found in measured.items()
    ]


def attention_points(name: str, rows: Iterable[dict[str, str]]) -> tuple[list[Point], list[Point]]:
    """Of decode batches, and of single chunks. Their sizes are of one rank's share of the heads."""
    decodes, chunks = [], []
    for row in rows:
        shape, tp = layer_of(name, row, "n_q_head", "n_kv_head", 0), int(row["num_tensor_parallel_workers"])
        cached, batch, chunk = int(row["kv_cache_size"]), int(row["batch_size"]), int(row["prefill_chunk_size"])
        if row["is_prefill"] == "True" and (time := median_of(row, "attn_prefill")) and chunk <= MOST_TOKENS:
            chunks.append(Point(shape, tp, Features().with_chunk(cached, chunk), time))
        elif row["is_prefill"] == "False" and (time := median_of(row, "attn_decode")):
            decodes.append(Point(shape, tp, Features(decodes=batch, decode_context=batch * cached), time))
    return decodes, chunks


@dataclass
class Profiles:
    """By GPU: linear layers by model, and attention of decodes and of chunks."""

    linear: dict[str, dict[str, list[Point]]]
    attention: dict[str, tuple[list[Point], list[Point]]]


def read(folder: Path) -> Profiles:
    """Raises OSError or ValueError for what cannot be read."""
    found = Profiles(defaultdict(dict), {})
    for path in sorted(folder.rglob("*.csv")):
        where = str(path.relative_to(folder)).lower()
        key = next((name for name in GPUS if name.split("-")[0] in where), None)
        if key is None:
            continue
        with path.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            columns = set(rows.fieldnames or ())
            name = path.stem if path.stem not in ("mlp", "attention") else path.parent.name
            if "time_stats.mlp_up_proj.median" in columns:
                found.linear[key][name] = linear_points(name, rows)
            elif {"time_stats.attn_prefill.median", "n_q_head"} <= columns:
                found.attention[key] = attention_points(name, rows)
    return found


# Fitting.


def fit(law: Law, hardware: Hardware, names: Sequence[str], points: Sequence[Point]) -> Hardware:
    """The named constants that make the error least: steps up and down each in turn, ever smaller ones."""
    best, least, step = hardware, error(law, hardware, points), 0.2
    while step > 0.005:
        moved = False
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                trial = replace(best, **{name: getattr(best, name) * factor})
                if (found := error(law, trial, points)) < least - 1e-4:
                    best, least, moved = trial, found, True
        step = step if moved else step / 2
    return best


LINEAR = ("memory_fraction", "compute_fraction", "norm", "kernel_s")
ATTENTION = ("attention_fraction", "attention_diagonal", "attention_keys", "attention_s", "attention_waves")
APART = ("memory_fraction", *ATTENTION)
"""With a fraction of the bandwidth of its own, beside that of the linear layers."""


def rows_of(profiles: Profiles) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, models in profiles.linear.items():
        shipped = gpu(key).hardware
        for name, points in models.items():
            rows.append(_row(key, "linear layers", "as shipped", name, linear, shipped, points))
            for other in models:
                if other != name:
                    fitted = fit(linear, shipped, LINEAR, models[other][::3])
                    rows.append(_row(key, "linear layers", other, name, linear, fitted, points))
    for key, (decodes, chunks) in profiles.attention.items():
        shipped = gpu(key).hardware
        busy = [point for point in decodes if point.features.decode_context >= BUSY_CONTEXT]
        parts = (("all", decodes + chunks), ("chunks", chunks), ("decodes", decodes), ("decodes, much KV", busy))
        half = (decodes + chunks)[::8]
        seen = set(half)
        fits = {
            "as shipped": shipped,
            "8th points": fit(attention, shipped, ATTENTION, half),
            "8th, bandwidth": fit(attention, shipped, APART, half),
            "8th, no waves": fit(attention, replace(shipped, attention_waves=0.0), APART, half),
        }
        for fitted_on, fitted in fits.items():
            for name, points in parts:
                rest = points if fitted is shipped else [point for point in points if point not in seen]
                rows.append(_row(key, "attention", fitted_on, name, attention, fitted, rest))
    return rows


def _row(
    key: str,
    term: str,
    fitted_on: str,
    reported_on: str,
    law: Law,
    hardware: Hardware,
    points: Sequence[Point],
) -> dict[str, Any]:
    total = sum(point.seconds for point in points)
    off = sum(abs(law(hardware, point) - point.seconds) for point in points)
    names = (*LINEAR, "tile") if term == "linear layers" else APART
    return {
        "gpu": gpu(key).hardware.name,
        "term": term,
        "fitted_on": fitted_on,
        "reported_on": reported_on,
        "points": len(points),
        "mape_percent": round(error(law, hardware, points), 2),
        "off_by_time_percent": round(100 * off / total, 2),
        "constants": {name: _short(getattr(hardware, name)) for name in names},
    }


def _short(value: float) -> float:
    return value if value == 0 else round(value, 3 - math.floor(math.log10(abs(value))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with operator profiles")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.exit(2, f"--data: there is no folder {options.data}\n")
    try:
        rows = rows_of(read(options.data))
    except (OSError, ValueError, KeyError) as error:
        parser.exit(2, f"--data: {type(error).__name__}: {error}\n")
    if not rows:
        parser.exit(2, f"--data: {options.data} has no profile of {' or '.join(GPUS)}\n")
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(f"{'GPU':8} {'term':14} {'fitted on':18} {'reported on':26} {'points':>6} {'MAPE':>7} {'of time':>8}")
    for row in rows:
        told = f"{row['gpu']:8} {row['term']:14} {row['fitted_on']:18} {row['reported_on']:26} {row['points']:6}"
        print(f"{told} {row['mape_percent']:6.2f}% {row['off_by_time_percent']:7.2f}%")


if __name__ == "__main__":
    main()
