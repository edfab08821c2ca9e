"""Real gloo groups: TP 1, 2 and 3 give the same tokens, each rank from its own shard."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from scheduler.sampling import SamplingParams
from tests.conftest import save_tiny
from tests.workers.driver import Driver, reference_logits, reference_tokens
from workers.config import WorkerConfig
from workers.parallel import Ranks
from workers.parts import Part, split
from workers.stores import listening_store, store_at
from workers.worker import Worker


@dataclass(frozen=True)
class RankReport:
    tokens: list[list[int]]
    scores: list[float]
    query_heads: int
    kv_heads: int
    weight_bytes: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_rank(
    folder: str, rank: int, size: int, rendezvous: str, prompts: list[list[int]], count: int, kv_dtype: str
) -> RankReport:
    """In a process of its own: greedy for the first prompt, which is scored, seeded sampling for the others, all in one
    batch."""
    config = WorkerConfig(folder, rank=rank, world_size=size, rendezvous=rendezvous, threads=1, kv_dtype=kv_dtype)
    worker = Worker(config)
    description = worker.load()
    worker.allocate(200)
    driver = Driver(worker, scored={0})
    for slot, prompt in enumerate(prompts):
        driver.admit(slot, prompt, SamplingParams(temperature=0.0 if slot == 0 else 1.0, seed=slot, prompt_logprobs=0))
    while any(len(driver.tokens[slot]) < len(prompt) + count for slot, prompt in enumerate(prompts)):
        driver.step({slot: min(25, driver.remaining(slot)) for slot in range(len(prompts))})
    worker.close()
    tokens = [driver.tokens[slot][len(prompt) :][:count] for slot, prompt in enumerate(prompts)]
    scores = [score.logprob for score in driver.scores[0][: len(prompts[0]) - 1]]
    return RankReport(tokens, scores, description.query_heads, description.kv_heads, description.weight_bytes)


def run_group(
    folder: Path, size: int, prompts: list[list[int]], count: int, kv_dtype: str = "auto"
) -> list[RankReport]:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(run_rank, str(folder), r, size, rendezvous, prompts, count, kv_dtype) for r in range(size)]
        return [rank.result(timeout=240) for rank in ranks]


PROMPTS = [[(7 * i) % 500 for i in range(60)], [3, 4, 5], [(11 * i) % 500 for i in range(31)]]


def test_tp_1_2_and_3_give_the_same_tokens_from_uneven_shards(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, attention_bias=True, mlp_bias=True)
    one, two, three = (run_group(folder, size, PROMPTS, 20) for size in (1, 2, 3))
    for reports in (two, three):
        assert all(report.tokens == one[0].tokens for report in reports), "every rank knows every token"
        assert all(report.scores == pytest.approx(one[0].scores, abs=1e-4) for report in reports)
    assert one[0].tokens[0] == reference_tokens(folder, PROMPTS[0], 20)
    logprobs = torch.log_softmax(reference_logits(folder, PROMPTS[0]), dim=1)[:-1]
    wanted = logprobs.gather(1, torch.tensor(PROMPTS[0][1:]).unsqueeze(1)).squeeze(1).tolist()
    assert one[0].scores == pytest.approx(wanted, abs=1e-4)
    assert [(r.query_heads, r.kv_heads) for r in two] == [(6, 2), (3, 1)]
    assert [(r.query_heads, r.kv_heads) for r in three] == [(3, 1)] * 3
    assert all(report.weight_bytes < 0.7 * one[0].weight_bytes for report in two)
    assert all(report.weight_bytes < 0.4 * one[0].weight_bytes for report in three)


def test_norms_of_heads_are_those_of_the_ranks_own_heads(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    expected = reference_tokens(folder, PROMPTS[0], 12)
    assert all(report.tokens[0] == expected for report in run_group(folder, 2, PROMPTS[:1], 12))


@pytest.mark.slow
def test_kv_in_int8_is_the_same_at_every_degree(tmp_path: Path) -> None:
    """A scale is one token's and one head's, and a head is not divided."""
    folder = save_tiny(tmp_path)
    one, two = (run_group(folder, size, PROMPTS, 20, "int8") for size in (1, 2))
    assert all(report.tokens == one[0].tokens for report in two)


def test_tp_2_on_the_real_model(smollm2_dir: Path) -> None:
    prompt = [(37 * i) % 40_000 for i in range(50)]
    reports = run_group(smollm2_dir, 2, [prompt], 8)
    assert all(report.tokens[0] == reference_tokens(smollm2_dir, prompt, 8) for report in reports)


@pytest.mark.slow
def test_tp_3_on_the_real_model(smollm2_dir: Path) -> None:
    prompt = [(37 * i) % 40_000 for i in range(50)]
    reports = run_group(smollm2_dir, 3, [prompt], 16)
    assert all(report.tokens[0] == reference_tokens(smollm2_dir, prompt, 16) for report in reports)


def test_a_split_is_even_contiguous_and_whole() -> None:
    assert split(3, 2) == [Part(0, 2), Part(2, 3)]
    for count in range(1, 40):
        for ranks in range(1, count + 1):
            parts = split(count, ranks)
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
            assert max(p.size for p in parts) - min(p.size for p in parts) <= 1
    with pytest.raises(ValueError, match="cannot be divided"):
        split(2, 3)


def test_more_ranks_than_kv_heads_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    with pytest.raises(ValueError, match="degree 4 is too large: the model has 3 KV heads"):
        Worker(WorkerConfig(str(folder), world_size=4, rendezvous="tcp://127.0.0.1:1")).load()


def test_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        Ranks(0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Ranks(2, 2)


def test_what_ranks_meet_at_is_on_the_address_that_was_said() -> None:
    before = listening()
    store = listening_store("127.0.0.1", 0, timedelta(seconds=5))
    assert listening() - before == {("127.0.0.1", store.port)}
    store_at("127.0.0.1", store.port, timedelta(seconds=5)).set("key", "value")
    assert store.get("key") == b"value"


def listening() -> set[tuple[str, int]]:
    """Addresses and ports of this process."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_rendezvous_that_is_no_address() -> None:
    with pytest.raises(ValueError, match="not 'file:///tmp/x'"):
        Ranks(0, 2, "cpu", "file:///tmp/x")
