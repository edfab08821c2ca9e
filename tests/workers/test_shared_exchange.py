"""Sums and gathers through shared memory, in real processes, held equal to gloo's."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.workers.test_tensor_parallel import free_port
from workers import parallel, shared_exchange
from workers.parallel import Ranks
from workers.shared_exchange import PeerGone, SharedExchange

SIZES = [1, 7, 8 * 576, 5000]


def work(rank: int, size: int, rendezvous: str) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """By shared memory and by gloo, of the same numbers, in pieces of 1,000."""
    torch.set_num_threads(1)
    shared_exchange.PLACE = parallel.PLACE = 1000
    ranks = Ranks(rank, size, rendezvous=rendezvous)
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    shared = ranks.shared
    for results, exchange in zip(found, (shared, None), strict=True):
        ranks.shared = exchange
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            results += [ranks.sum(torch.randn(n, generator=generator)) for n in SIZES]
        part = ranks.part(700)
        results.append(ranks.gather_columns(torch.randn(9, 700, generator=generator)[:, : part.size], 700))
    how = "none" if shared is None else "shared memory"
    ranks.close()
    return how, *found


@pytest.mark.parametrize("size", [2, 3])
def test_it_equals_gloo(size: int) -> None:
    with ProcessPoolExecutor(size, multiprocessing.get_context("spawn")) as pool:
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        reports = [task.result(120) for task in [pool.submit(work, rank, size, rendezvous) for rank in range(size)]]
    for how, shared, gloo in reports:
        assert how == "shared memory"
        for one, other in zip(shared, gloo, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert all(torch.equal(one, first) for one, first in zip(shared, reports[0][1], strict=True)), "on all ranks"


def die(rank: int, rendezvous: str) -> str:
    """Rank 1 ends in the middle; rank 0 tells what becomes of its sum."""
    ranks = Ranks(rank, 2, rendezvous=rendezvous)
    ranks.sum(torch.ones(3))
    if rank == 1:
        os._exit(1)
    try:
        ranks.sum(torch.ones(3))
    except PeerGone as error:
        return str(error)
    return "it came back"


def told(rendezvous: str, queue: multiprocessing.Queue[str]) -> None:
    queue.put(die(0, rendezvous))


def test_a_rank_that_died_is_noticed() -> None:
    context = multiprocessing.get_context("spawn")
    queue, rendezvous = context.Queue(), f"tcp://127.0.0.1:{free_port()}"
    processes = [
        context.Process(target=told, args=(rendezvous, queue)),
        context.Process(target=die, args=(1, rendezvous)),
    ]
    for process in processes:
        process.start()
    assert queue.get(timeout=60) == "rank 1 is gone"
    for process in processes:
        process.join(30)


def elsewhere(rank: int, rendezvous: str) -> bool:
    """Rank 1 cannot reach what rank 0 has, as on another host."""
    if rank == 1:
        shared_exchange._reach = lambda path, nonce, size: None
    ranks = Ranks(rank, 2, rendezvous=rendezvous)
    total = ranks.sum(torch.full((4,), rank + 1.0))
    ranks.close()
    return ranks.shared is None and ranks.collectives == "gloo" and total.tolist() == [3.0] * 4


def test_ranks_on_other_hosts_take_gloo() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        assert all(task.result(120) for task in [pool.submit(elsewhere, rank, rendezvous) for rank in range(2)])


def test_one_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_exchange, "SPINS", 20)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        exchange = SharedExchange.open(0, 1, 0.2, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert exchange is not None
    exchange._size = 2  # the other is this process too, which has no second thread in it
    exchange._pids = torch.tensor([os.getpid(), os.getpid()]).numpy()
    exchange._counters = torch.zeros(16, dtype=torch.int64).numpy()
    with pytest.raises(PeerGone, match="rank 1 has not come"):
        exchange.sum(torch.ones(2))
