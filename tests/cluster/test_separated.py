"""Prefill and decode on groups of their own, on a real local Ray: the tokens of one process, aborts and deaths at any
moment, room that is not there, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.async_cluster import AsyncCluster
from cluster.local import LocalEngine
from deploy.trace import chrome_trace
from scheduler.errors import RequestRefused
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from tests.cluster.test_ray import collect, running, tiny
from tests.deploy.chrome import check_trace
from tests.workers.driver import reference_tokens

pytestmark = pytest.mark.usefixtures("ray_cluster")

LONG = tuple(2 + (7 * i) % 500 for i in range(150))  # without the pad token, which transformers leaves out


def request(name: str, *, prompt: tuple[int, ...] = LONG, max_tokens: int = 20, seed: int | None = None) -> Request:
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed, presence_penalty=0.5)
    return Request(name, prompt, max_tokens, sampling)


def as_json(made: Request) -> Request:
    return replace(made, sampling=replace(made.sampling, json_schema='{"type":"object"}', end_tokens=(2,)))


def some(count: int) -> list[Request]:
    """Greedy and seeded ones; one in three has to be JSON."""
    found = [request(f"r{i}", prompt=LONG[i:] + LONG[:i], seed=i if i % 2 else None) for i in range(count)]
    return [as_json(each) if i % 3 == 2 else each for i, each in enumerate(found)]


async def alone(folder: Path, requests: list[Request]) -> list[list[int]]:
    """What one process gives."""
    local = await LocalEngine.start(tiny(folder, policy="chunked", profile_seconds=0))
    try:
        return [(await collect(local, each))[0] for each in requests]
    finally:
        await local.close()


@asynccontextmanager
async def separated(folder: Path, **options: object) -> AsyncIterator[AsyncCluster]:
    defaults: dict[str, object] = {"mode": "separated", "policy": "chunked", "profile_seconds": 0}
    async with running(tiny(folder, **{**defaults, **options})) as cluster:
        yield cluster


async def when(cluster: AsyncCluster, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The figures once that holds."""
    for _ in range(1500):
        stats = await cluster.stats()
        if holds(stats):
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came: {stats}")


def nothing_held(stats: dict[str, Any]) -> bool:
    return all(
        group["blocks_free"] == group["blocks_total"] and not group["blocks_leased"] and not group["arriving"]
        for group in stats["groups"]
    )


async def test_the_tokens_of_one_process_and_what_is_told_of_the_transfers(tiny_model_dir: Path) -> None:
    requests = some(6)
    wanted = await alone(tiny_model_dir, requests)
    assert wanted[0] == reference_tokens(tiny_model_dir, LONG, 20)
    async with separated(tiny_model_dir, prefill_tp=2, decode_tp=1) as cluster:
        info = cluster.info
        assert (info.mode, info.prefill_groups, info.decode_groups, info.groups) == ("separated", 1, 1, 2)
        assert (info.prefill_tp, info.decode_tp) == (2, 1)
        got = await asyncio.gather(*(collect(cluster, each) for each in requests))
        assert [tokens for tokens, _ in got] == wanted
        again = await collect(cluster, request("again"))
        assert again[0] == wanted[0]
        assert again[1].finish is Finish.LENGTH
        stats = await when(cluster, nothing_held)
        assert [group["role"] for group in stats["groups"]] == ["prefill", "decode"]
        assert stats["groups"][1]["iterations"] >= 19
        layers, token_bytes = 3, 3 * 8 * 4
        transfers = stats["transfers"]
        assert transfers["requests"] == 7
        assert transfers["bytes"] <= 7 * 160 * layers * 2 * token_bytes
        assert 0 < transfers["early_bytes"] < transfers["bytes"]
        assert transfers["send_s"] > 0
        entries = await cluster.iterations(-1, 1000)
        assert all(entry["decodes"] == 0 for entry in entries if entry["group"] == 0)
        assert all(not entry["chunks"] for entry in entries if entry["group"] == 1)
        moved = {each["request"]: each for entry in entries for each in entry.get("transfers", [])}
        assert moved["r0"]["blocks_sent"] == 10
        assert (moved["again"]["blocks_shared"], moved["again"]["blocks_sent"]) == (9, 1)
        assert all(begun <= ended for each in moved.values() for begun, ended in each["sends"])
        assert len(moved["r0"]["sends"]) > 1, "in parts, while it was computed"
        drawn = check_trace(chrome_trace(entries))
        assert sum(event["ph"] == "s" for event in drawn) == 7
        text = (await cluster.metrics()).decode()
        assert "stallfree_kv_transfer_requests_total{model_name=" in text
        await cluster.health(30)
        one = await collect(cluster, request("one", max_tokens=1))
        assert one[0] == wanted[0][:1]
        with pytest.raises(RequestRefused, match="KV blocks"):
            await collect(cluster, request("big", prompt=LONG * 8))


async def test_aborts_at_every_stage_free_both_sides(tiny_model_dir: Path) -> None:
    async with separated(tiny_model_dir) as cluster:
        for number, tokens in enumerate((0, 1, 2, 5)):
            name = f"a{number}"
            stream = cluster.generate(request(name, prompt=LONG * 5, max_tokens=200))
            for _ in range(tokens):
                await anext(stream)
            if not tokens:
                started = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.05)
                cluster.abort(name)
                await started
            await stream.aclose()
            await when(cluster, nothing_held)
        (tokens, last) = await collect(cluster, request("after"))
        assert tokens == reference_tokens(tiny_model_dir, LONG, 20)
        assert last.finish is Finish.LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_without_room_to_decode_prompts_wait_and_none_is_lost(tiny_model_dir: Path, preempt: str) -> None:
    requests = [replace(each, max_tokens=50) for each in some(8)]
    wanted = await alone(tiny_model_dir, requests)
    async with separated(tiny_model_dir, num_blocks=24, max_running=3, preempt=preempt) as cluster:
        streams = [asyncio.create_task(collect(cluster, each)) for each in requests]
        await cluster.health(30)
        got = await asyncio.gather(*streams)
        assert [tokens for tokens, _ in got] == wanted
        stats = await when(cluster, nothing_held)
        prefill, decode = stats["groups"]
        assert prefill["preemptions"] == 0
        assert decode["preemptions"] > 0
        assert bool(decode["swapped_in"]) is (preempt == "swap")
        assert decode["swap_blocks"]["used"] == prefill["swapped_out"] == 0


async def test_killed_groups_lose_no_request(tiny_model_dir: Path) -> None:
    """Mid-transfer, first one that decodes, then the one that prefills."""
    requests = [request(f"r{i}", prompt=(LONG[i:] + LONG[:i]) * 3, max_tokens=60) for i in range(6)]
    requests[1] = as_json(requests[1])
    wanted = await alone(tiny_model_dir, requests)
    async with separated(tiny_model_dir, num_blocks=300, decode_groups=2) as cluster:
        for losses, victim in ((1, 1), (2, 0)):
            again = [
                replace(each, request_id=f"{each.request_id}/{victim}", cache_salt=str(victim)) for each in requests
            ]
            streams = [asyncio.create_task(collect(cluster, each)) for each in again]
            await when(cluster, lambda stats: stats["groups"][1]["running"] + stats["groups"][1]["arriving"] > 1)
            pids = await cluster.scheduler.pids.remote()
            os.kill(pids[victim][0], signal.SIGKILL)
            got = await asyncio.wait_for(asyncio.gather(*streams), 120)
            assert [tokens for tokens, _ in got] == wanted
            assert all(last.finish is Finish.LENGTH for _, last in got)
            stats = await when(cluster, lambda stats: nothing_held(stats) and not stats["rebuilding"])
            assert stats["worker_losses"] == losses
        after = await collect(cluster, request("after"))
        assert after[0] == reference_tokens(tiny_model_dir, LONG, 20)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
async def test_a_group_that_hangs_while_blocks_move_loses_no_request(tiny_model_dir: Path, victim: int) -> None:
    """Nothing says that it is gone: its sockets are open, and it never answers."""
    requests = [request(f"r{i}", prompt=(LONG[i:] + LONG[:i]) * 5, max_tokens=10) for i in range(4)]
    requests[2] = as_json(requests[2])
    wanted = await alone(tiny_model_dir, requests)
    async with separated(tiny_model_dir, num_blocks=300, decode_tp=2, hang_seconds=1) as cluster:
        pids = await cluster.scheduler.pids.remote()
        streams = [asyncio.create_task(collect(cluster, each)) for each in requests]
        await when(cluster, lambda stats: bool(stats["groups"][1]["arriving"] and stats["groups"][0]["blocks_leased"]))
        os.kill(pids[victim][-1], signal.SIGSTOP)
        got = await asyncio.wait_for(asyncio.gather(*streams), 300)
        assert [tokens for tokens, _ in got] == wanted
        assert all(last.finish is Finish.LENGTH for _, last in got)
        stats = await when(cluster, lambda stats: nothing_held(stats) and not stats["rebuilding"])
        assert stats["worker_losses"] == 1
        _, incidents = await cluster.scheduler.incidents.remote()
        assert any("hung" in line for line in incidents), incidents
        assert (await collect(cluster, request("after")))[0] == reference_tokens(tiny_model_dir, LONG, 20)


@pytest.mark.slow
async def test_a_decode_group_that_hangs_while_idle_loses_no_request(tiny_model_dir: Path) -> None:
    wanted = reference_tokens(tiny_model_dir, LONG, 20)
    async with separated(tiny_model_dir, decode_tp=2, hang_seconds=1) as cluster:
        assert (await collect(cluster, request("before")))[0] == wanted
        pids = await cluster.scheduler.pids.remote()
        os.kill(pids[1][1], signal.SIGSTOP)
        assert (await collect(cluster, request("r", prompt=LONG)))[0] == wanted
        stats = await when(cluster, lambda stats: nothing_held(stats) and not stats["rebuilding"])
        assert stats["worker_losses"] == 1
        _, incidents = await cluster.scheduler.incidents.remote()
        assert any("hung" in line for line in incidents), incidents


@pytest.mark.slow
async def test_slo_on_both_sides_promises_by_role(tiny_model_dir: Path) -> None:
    async with separated(tiny_model_dir, policy="slo", profile_seconds=1.0) as cluster:
        outlook = cluster.info.outlook
        assert outlook is not None
        assert all(row.feasible for row in outlook.ttft)
        tokens, _ = await collect(cluster, request("r"))
        assert tokens == reference_tokens(tiny_model_dir, LONG, 20)
        await cluster.configure("chunked", 64)
        assert (await collect(cluster, request("again")))[0] == tokens
