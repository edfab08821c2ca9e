"""One tenant floods a server that refuses what it cannot promise, another asks now and then: who is let in.

    python -m benchmarks.fairness [--seconds 60] [--flood 20] [--other 0.5] [--ttft-ms 1500] [--tpot-ms 200] [--json]

A server of its own with two API keys, `--on-infeasible reject`, the embedded model; Poisson arrivals, prompts of 64 to
256 tokens and 16 answered. Told are, for each tenant, how many it sent, how many of them were let in, and how many of
those had their first token in time by the client's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from cluster.config import EngineConfig
from cluster.workloads import Fixed, OpenLoop, Uniform, poisson, requests
from deploy import running
from deploy.api.keys import Key, new_secret
from deploy.bench import SloTargets, Target, drive, figures
from deploy.lifetime import Lifetime

PROMPTS, ANSWERS = Uniform(64, 256), Fixed(16)
BEGIN_S = 2.0
"""Before that both clients find out how the server is spoken to."""


async def tenant(url: str, secret: str, name: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    target = Target(url, api_key=secret, extra={"slo": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms}})
    times = [BEGIN_S + at for at in poisson(rate, options.seconds, seed=1)]
    load = OpenLoop(requests(times, PROMPTS, ANSWERS, seed=2))
    found = figures(await drive(target, load), SloTargets(ttft_s=options.ttft_ms / 1e3))
    return {
        "tenant": name,
        "requests_per_s": rate,
        "sent": found.requests,
        "let_in": found.finished,
        "share_let_in": round(found.finished / max(1, found.requests), 3),
        "share_kept": round(found.met / max(1, found.finished), 3),
        "errors": found.errors,
    }


async def both(url: str, rates: dict[str, float], secrets: dict[str, str], options: argparse.Namespace) -> list[Any]:
    return await asyncio.gather(*(tenant(url, secrets[name], name, rate, options) for name, rate in rates.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--flood", type=float, default=20.0, help="requests a second of one tenant")
    parser.add_argument("--other", type=float, default=0.5, help="and of the other")
    parser.add_argument("--ttft-ms", type=float, default=1500.0)
    parser.add_argument("--tpot-ms", type=float, default=200.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if min(options.seconds, options.flood, options.other) <= 0:
        parser.exit(2, "--seconds, --flood and --other are above 0\n")
    rates = {"flood": options.flood, "other": options.other}
    secrets = {name: new_secret() for name in rates}
    keys = tuple(Key.of(name, secret) for name, secret in secrets.items())
    config = EngineConfig(policy="slo", on_infeasible="reject")
    with Lifetime() as life:
        server = life.run(
            lambda: running.start(
                life,
                config,
                running.Address("127.0.0.1", 0),
                extra={"api_keys": keys},
                say=lambda line: print(line, file=sys.stderr),
            )
        )
        told = asyncio.run(both(server.address.url, rates, secrets, options))
    for row in told:
        print(json.dumps(row) if options.json else ", ".join(f"{key}: {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
