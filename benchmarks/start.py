"""From `stallfree serve` to the first token, and what memory a worker takes then.

    python -m benchmarks.start [--rounds 3] [--json]

The embedded model from a warm cache. In each round the command is started anew, and asked as soon as it answers; then
once more with a small KV pool. Memory is what the worker's process has resident, against its weights and its whole KV
pool: what it takes besides is the same whatever they are, so that the ratio tells little without their size.
`files_mib` of it are pages of files, libraries mostly, which it shares with whoever has mapped the same
(docs/performance.md).
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.command import run_rounds
from deploy.ports import check_port
from workers.attention import PAGE_SIZE
from workers.checkpoint import resolve
from workers.kv_cache import bytes_per_block
from workers.model_config import read_config

START_AT_MOST_S, MEMORY_AT_MOST = 30.0, 1.3
LONGEST_S = 240.0
MODEL, FEW_BLOCKS = "smollm2", 1024


@dataclass(frozen=True)
class Held:
    """Bytes of the weights, and of a KV block."""

    weights: int
    block: int

    @classmethod
    def by(cls, folder: Path) -> Held:
        config = read_config(folder)
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        return cls(
            weights=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            block=bytes_per_block(layers, PAGE_SIZE["cpu"], heads, config.head_dim, torch.float32),
        )


def round_of(held: Held) -> dict[str, float]:
    usual, small = started([], held), started(["--num-blocks", str(FEW_BLOCKS)], held)
    return usual | {"memory_small": small["memory"], "held_small_mib": small["held_mib"]}


def started(options: list[str], held: Held) -> dict[str, float]:
    port = check_port("127.0.0.1", 0)
    options = ["--model", MODEL, "--port", str(port), "--json", *options]
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        first_token = until_first_token(f"http://127.0.0.1:{port}", server) - began
        taken = memory_of_rank(server.pid)
        assert server.stdout is not None
        blocks = json.loads(server.stdout.readline())["num_blocks"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    held_bytes = held.weights + blocks * held.block
    return {
        "start_s": first_token,
        "memory": taken.rss / held_bytes,
        "held_mib": held_bytes / 2**20,
        "resident_mib": taken.rss / 2**20,
        "files_mib": taken.shared / 2**20,
    }


def memory_of_rank(server: int) -> Any:
    """psutil's figures of the worker's process, in bytes."""
    for process in psutil.Process(server).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # others come and go while the server starts
            if "RankActor" in " ".join(process.cmdline()):
                return process.memory_info()
    raise RuntimeError("the server has no worker")


def until_first_token(url: str, server: subprocess.Popen[bytes]) -> float:
    """When it came, on the monotonic clock. Raises RuntimeError with the server's last answer."""
    until, last = time.monotonic() + LONGEST_S, "there was no answer"
    body = {"model": MODEL, "prompt": "The first token", "max_tokens": 1, "temperature": 0}
    while time.monotonic() < until and server.poll() is None:
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
            if answer.status_code == 200:
                return time.monotonic()
            last = answer.text
            if answer.status_code == 400:
                break
        time.sleep(0.1)
    raise RuntimeError(f"no token came: {last}")


def measure(rounds: int) -> dict[str, Any]:
    held = Held.by(resolve(MODEL))
    taken = [round_of(held) for _ in range(rounds)]
    medians = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
    return {
        "rounds": rounds,
        "start_s": round(medians["start_s"], 1),
        "start_at_most_s": START_AT_MOST_S,
        "start_holds": medians["start_s"] <= START_AT_MOST_S,
        "memory": round(medians["memory"], 3),
        "memory_at_most": MEMORY_AT_MOST,
        "memory_holds": medians["memory"] <= MEMORY_AT_MOST,
        **{name: round(medians[name]) for name in ("held_mib", "resident_mib", "files_mib", "held_small_mib")},
        "memory_small": round(medians["memory_small"], 3),
    }


def show(result: dict[str, Any]) -> None:
    for what, name, unit in (("to the first token", "start", "_s"), ("resident / (weights + KV pool)", "memory", "")):
        verdict = "" if result[f"{name}_holds"] else "  MISSED"
        print(f"{what:<34}{result[name + unit]:>7}{unit[1:]:<2} at most {result[f'{name}_at_most{unit}']:g}{verdict}")
    print(f"the latter of {result['held_mib']} MiB; of {result['held_small_mib']} MiB it is {result['memory_small']}")


if __name__ == "__main__":
    run_rounds(__doc__, 3, measure, show)
