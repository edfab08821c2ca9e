"""What /metrics says of the KV pool, from what the schedulers say of themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.assembly import make_scheduler
from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.metrics import EngineMetrics
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.cluster.test_loop import Rig, requests
from tests.scheduler.world import VOCAB, Run

SMALL = SchedulerConfig(num_blocks=12, block_size=4, max_model_len=40, vocab_size=VOCAB, max_running=4, swap_blocks=4)


def told(metrics: EngineMetrics, groups: list[dict[str, Any]]) -> dict[str, float]:
    """Sample values by name, and by their own label where they have one."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.expose(groups).decode()):
        for sample in family.samples:
            if "_kv_" not in sample.name and "_prefix_" not in sample.name and "_preemptions_" not in sample.name:
                continue
            own = [value for label, value in sample.labels.items() if label in ("state", "cause")]
            samples[":".join([sample.name, *own])] = sample.value
    return samples


def worked() -> Scheduler:
    """A pool that is too small: hits, evictions and preemptions of both causes."""
    run = Run.of(Scheduler(SMALL, make_policy("chunked", chunk_size=8)))
    for index in range(8):
        run.add(Request(f"r{index}", (*range(10), index, index), 18))
    for _ in range(12):
        run.step()
    run.scheduler.requeue_all()
    run.worker.replace()
    run.drain()
    return run.scheduler


def test_blocks_hits_evictions_and_preemptions() -> None:
    metrics, scheduler = EngineMetrics("m"), worked()
    stats = scheduler.stats()
    samples = told(metrics, [stats])
    assert [samples[f"stallfree_kv_blocks:{state}"] for state in ("free", "cached", "referenced")] == list(
        stats["blocks"].values()
    )
    assert samples["stallfree_kv_blocks_free"] == samples["stallfree_kv_blocks_total"] == 12
    assert samples["stallfree_prefix_cache_queried_tokens_total"] == stats["prefix_tokens_queried"] == 8 * 12
    assert samples["stallfree_prefix_cache_hit_tokens_total"] == stats["prefix_tokens_hit"] > 0
    assert samples["stallfree_kv_swapped_out_blocks_total"] == stats["swapped_out"] > 0
    assert samples["stallfree_kv_swapped_in_blocks_total"] == stats["swapped_in"]
    assert samples["stallfree_kv_swap_blocks:free"] == 4
    assert samples["stallfree_kv_swap_blocks:used"] == 0
    assert samples["stallfree_kv_evictions_total"] == stats["evictions"] > 0
    assert samples["stallfree_preemptions_total:kv_blocks"] == stats["preemptions_by_cause"]["kv_blocks"] > 0
    assert samples["stallfree_preemptions_total:workers_lost"] == stats["preemptions_by_cause"]["workers_lost"] > 0
    assert samples["stallfree_kv_violations_total"] == 0
    assert told(metrics, [stats]) == samples, "asking again counts nothing again"
    both = told(metrics, [stats, stats])
    assert both["stallfree_kv_evictions_total"] == 2 * stats["evictions"]
    assert both["stallfree_kv_blocks:cached"] == 2 * stats["blocks"]["cached"]


def test_a_count_that_starts_anew_takes_nothing_back() -> None:
    metrics, stats = EngineMetrics("m"), worked().stats()
    before = told(metrics, [stats])["stallfree_kv_evictions_total"]
    anew = Scheduler(SMALL, make_policy("chunked")).stats()
    assert told(metrics, [anew])["stallfree_kv_evictions_total"] == before


async def test_what_does_not_add_up_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.ERROR):
        first, second, *_ = requests(3)
        await rig.generate(first)
        await asyncio.sleep(0.01)
        assert not caplog.records
        rig.loop.scheduler.pool.allocate(1)  # by nobody: lost
        await rig.generate(second)
        await asyncio.sleep(0.01)
        assert rig.loop.scheduler.stats()["violations"] >= 1
        await rig.generate(first)
        await asyncio.sleep(0.01)
    await rig.close()
    assert len(caplog.records) == 1
    assert "which is a bug" in caplog.text
    assert rig.loop.scheduler.stats()["violations"] >= 2
    assert rig.loop.failure is None


@pytest.mark.parametrize("caching", [True, False])
def test_the_configuration_decides_and_every_scheduler_has_a_key_of_its_own(caching: bool) -> None:
    config = EngineConfig(policy="chunked", prefix_caching=caching)
    schedulers = [make_scheduler(config, INFO) for _ in range(2)]
    digests = []
    for scheduler in schedulers:
        assert scheduler.prefixes.enabled is caching
        run = Run.of(scheduler)
        run.add(Request("r", tuple(range(20)), 2))
        sequence = run.scheduler.waiting[0]
        run.drain()
        digests.append(sequence.digests)
    assert digests[0] != digests[1] if caching else digests == [[], []]


INFO = EngineInfo(
    model="m",
    model_dir="",
    served_model_name="m",
    max_model_len=100,
    vocab_size=VOCAB,
    block_size=4,
    num_blocks=40,
    tp=1,
    groups=1,
    policy="chunked",
    chunk_size=16,
    device="cpu",
    dtype="float32",
    attention="cpu",
    transport="none",
    most_requests=8,
)
