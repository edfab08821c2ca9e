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
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

from cluster.config import EngineConfig
from deploy import running
from deploy.api.keys import Key, new_secret
from deploy.lifetime import Lifetime

PROMPT, ANSWER = (64, 256), 16


class Tenant:
    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate, self.secret = name, rate, new_secret()
        self.random = random.Random(name)
        self.seen: Counter[str] = Counter()

    async def send(self, client: httpx.AsyncClient, seconds: float, slo: dict[str, float]) -> None:
        until, sent = time.monotonic() + seconds, []
        while time.monotonic() < until:
            await asyncio.sleep(self.random.expovariate(self.rate))
            sent.append(asyncio.create_task(self._ask(client, slo)))
        await asyncio.gather(*sent)

    async def _ask(self, client: httpx.AsyncClient, slo: dict[str, float]) -> None:
        prompt = [self.random.randrange(1000, 40_000) for _ in range(self.random.randint(*PROMPT))]
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
        began, first = time.monotonic(), None
        self.seen["sent"] += 1
        key = {"Authorization": f"Bearer {self.secret}"}
        async with client.stream("POST", "/v1/completions", json={**body, "slo": slo}, headers=key) as answer:
            async for _ in answer.aiter_raw():
                first = first or time.monotonic() - began
        self.seen[str(answer.status_code)] += 1
        if answer.status_code == 200 and first is not None and 1e3 * first <= slo["ttft_ms"]:
            self.seen["kept"] += 1

    def told(self) -> dict[str, Any]:
        admitted = self.seen["200"]
        return {
            "tenant": self.name,
            "requests_per_s": self.rate,
            "sent": self.seen["sent"],
            "let_in": admitted,
            "share_let_in": round(admitted / max(1, self.seen["sent"]), 3),
            "share_kept": round(self.seen["kept"] / max(1, admitted), 3),
        }


async def both(url: str, tenants: list[Tenant], seconds: float, slo: dict[str, float]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(tenant.send(client, seconds, slo) for tenant in tenants))


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
    tenants = [Tenant("flood", options.flood), Tenant("other", options.other)]
    slo = {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms}
    keys = tuple(Key.of(tenant.name, tenant.secret) for tenant in tenants)
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
        asyncio.run(both(server.address.url, tenants, options.seconds, slo))
    for tenant in tenants:
        told = tenant.told()
        print(json.dumps(told) if options.json else ", ".join(f"{key}: {value}" for key, value in told.items()))


if __name__ == "__main__":
    main()
