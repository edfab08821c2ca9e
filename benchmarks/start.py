"""From `stallfree serve` to the first token, and what memory a worker takes then.

    python -m benchmarks.start [--rounds 3] [--json]

The embedded model from a warm cache. In each round the command is started anew, and asked as soon as it answers. Memory
is what the worker's process has resident, against its weights and its whole KV pool.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil

from deploy.ports import check_port
from workers.checkpoint import resolve

START_AT_MOST_S, MEMORY_AT_MOST = 30.0, 1.3
LONGEST_S = 240.0
KV_BLOCKS = 1024
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of the embedded model in float32: layers, keys and values, KV heads, their dimension."""
BLOCK = 16


def round_of(weight_bytes: int) -> dict[str, float]:
    port = check_port("127.0.0.1", 0)
    options = ["--port", str(port), "--num-blocks", str(KV_BLOCKS)]
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "serve", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        first_token = until_first_token(f"http://127.0.0.1:{port}", server) - began
        resident = max(
            process.memory_info().rss
            for process in psutil.Process(server.pid).children(recursive=True)
            if "RankActor" in " ".join(process.cmdline())
        )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    pool = KV_BLOCKS * BLOCK * KV_BYTES_PER_TOKEN
    return {"start_s": first_token, "memory": resident / (weight_bytes + pool), "resident_mib": resident / 2**20}


def until_first_token(url: str, server: subprocess.Popen[bytes]) -> float:
    """When it came, on the monotonic clock. Raises RuntimeError."""
    until = time.monotonic() + LONGEST_S
    body = {"prompt": "The first token", "max_tokens": 1, "temperature": 0}
    while time.monotonic() < until and server.poll() is None:
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
            if answer.status_code == 200:
                return time.monotonic()
        time.sleep(0.1)
    raise RuntimeError("no token came")


def measure(rounds: int) -> dict[str, Any]:
    weight_bytes = sum(path.stat().st_size for path in resolve("smollm2").glob("*.safetensors"))
    taken = [round_of(weight_bytes) for _ in range(rounds)]
    medians = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
    return {
        "rounds": rounds,
        "start_s": round(medians["start_s"], 1),
        "start_at_most_s": START_AT_MOST_S,
        "start_holds": medians["start_s"] <= START_AT_MOST_S,
        "memory": round(medians["memory"], 3),
        "memory_at_most": MEMORY_AT_MOST,
        "memory_holds": medians["memory"] <= MEMORY_AT_MOST,
        "resident_mib": round(medians["resident_mib"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for what, name in (("seconds to the first token", "start"), ("resident / (weights + KV pool)", "memory")):
        value, most = (result["start_s"], START_AT_MOST_S) if name == "start" else (result["memory"], MEMORY_AT_MOST)
        print(f"{what:<34}{value:>7} at most {most:g}{'' if result[f'{name}_holds'] else '  MISSED'}")


if __name__ == "__main__":
    main()
