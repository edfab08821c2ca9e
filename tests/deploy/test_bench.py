"""The load test as a library against the real engine, as a test of one's own would use it."""

from __future__ import annotations

import pytest

from cluster.workloads import Fixed, OpenLoop, Uniform, interference, poisson, requests
from deploy.bench import ClosedLoop, Progress, SloTargets, Target, as_json, drive, figures
from deploy.bench.record import CountedBy, Outcome


async def test_promises_are_kept_under_a_poisson_load(server_url: str) -> None:
    """The example: a load from a seed, a run, and what must hold of it."""
    times = poisson(rate=8, duration_s=1.0, seed=3)
    workload = OpenLoop(requests(times, Uniform(8, 48), Uniform(4, 8), seed=3))
    seen: list[Progress] = []
    run = await drive(Target(server_url), workload, warmup=2, progress=seen.append)
    found = figures(run, SloTargets(ttft_s=100, tpot_s=100))
    assert found.errors == {}
    assert found.finished == len(times) == found.ttft.n
    assert found.attainment == 1.0
    assert found.output_tokens == sum(plan.output_tokens for plan in workload.requests)
    assert found.prompt_tokens == sum(plan.prompt_tokens or 0 for plan in workload.requests)
    assert {record.counted_by for record in run.requests} == {CountedBy.TOKEN_IDS}
    assert seen[-1].finished == len(times)
    assert as_json(run, found)["ttft_ms"]["n"] == len(times)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_closed_loop_keeps_its_concurrency(server_url: str, endpoint: str) -> None:
    plans = requests([0.0] * 6, Fixed(12), Fixed(6))
    run = await drive(Target(f"{server_url}/v1", endpoint=endpoint), ClosedLoop(plans, 2))  # type: ignore[arg-type]
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED] * 6
    assert all(len(record.tokens) == 6 for record in run.requests)
    for record in run.requests:
        under_way = [other for other in run.requests if other.sent_s <= record.sent_s < other.ended_s]
        assert len(under_way) <= 2


async def test_a_long_prompt_into_running_streams(server_url: str) -> None:
    workload = interference(3, 200, output_lengths=Fixed(400), lead=3, tail=4)
    run = await drive(Target(server_url), workload)
    found = figures(run)
    assert found.errors == {}
    assert found.by_kind["stream"].finished == 3
    assert found.by_kind["long"].ttft.n == 1
    assert found.intrusion is not None
    assert found.intrusion.running == 3
    assert found.intrusion.during.n > 0
    assert found.attainment is None
    long = run.requests[-1]
    for stream in run.requests[:3]:
        assert sum(when < long.sent_s for when in stream.tokens) >= 3
        assert stream.left
        assert stream.tokens[-1] > long.tokens[-1]
