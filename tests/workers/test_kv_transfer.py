"""KV between real processes over gloo: other tensor-parallel degrees on each side, stale leases, a peer that dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from scheduler.plan import Admission, Forward, IterationPlan
from scheduler.sampling import SamplingParams
from tests.conftest import save_tiny
from tests.workers.driver import Driver, reference_tokens
from tests.workers.test_tensor_parallel import free_port
from workers.config import WorkerConfig
from workers.kv_cache import KvCache, bytes_per_block
from workers.kv_orders import STALE, LinkConfig, SendOrder, overlaps
from workers.kv_pages import HostPages, byte_planes, gather, scatter
from workers.kv_transfer import KvTransfer
from workers.parts import Part, split
from workers.worker import Worker

PROMPT = [(7 * i) % 500 for i in range(53)]
SEEDED = SamplingParams(temperature=1.0, seed=5)


# A rank in a process of its own, which does what it is told.


def rank_process(pipe: Connection, folder: str, rank: int, size: int, rendezvous: str) -> None:
    worker = Worker(WorkerConfig(folder, rank=rank, world_size=size, rendezvous=rendezvous, threads=1))
    worker.load()
    worker.allocate(40)
    driver = Driver(worker)
    calls: dict[str, Callable[..., Any]] = {
        "take_from": worker.transfer.take_from,
        "connect": worker.transfer.connect,
        "open": worker.transfer.open,
        "close": worker.transfer.close,
        "send": worker.transfer.send,
        "reports": worker.transfer.reports,
        "prefill": lambda sampling, counts: _prefill(driver, sampling, counts),
        "decode": lambda admission, count: _decode(worker, admission, count),
    }
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        name, arguments = told
        pipe.send(calls[name](*arguments))


def _prefill(driver: Driver, sampling: SamplingParams, counts: list[int]) -> tuple[list[int], list[int]]:
    """Its blocks and tokens after chunks of these sizes."""
    if 0 not in driver.tokens:
        driver.admit(0, PROMPT, sampling)
    for count in counts:
        driver.step({0: count})
    return driver.blocks[0], driver.tokens[0]


def _decode(worker: Worker, admission: Admission, count: int) -> list[int]:
    tokens: list[int] = []
    blocks = len(admission.blocks)
    for step in range(count):
        needed = -(-(admission.computed + step + 1) // worker.block_size)
        new = tuple((admission.slot, 39 - index) for index in range(blocks, needed))
        blocks = max(blocks, needed)
        plan = IterationPlan(step + 1, (Forward((admission.slot,), new_blocks=new),), (admission,) if not step else ())
        tokens += worker.execute(plan).tokens
    return tokens


class Group:
    """Rank processes of one worker group, asked side by side."""

    def __init__(self, folder: Path, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=rank_process, args=(there, str(folder), rank, size, rendezvous))
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def ready(self) -> None:
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def ask(self, rank: int, name: str, *arguments: Any) -> Any:
        self.pipes[rank].send((name, arguments))
        return self.pipes[rank].recv()

    def ask_all(self, name: str, *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((name, arguments))
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def link(prefill: Group, decode: Group, heads: int = 3) -> list[list[str]]:
    """Connect them; the names of each sending rank's links."""
    names: list[list[str]] = [[] for _ in range(prefill.size)]
    for s, t, part in overlaps(heads, prefill.size, decode.size):
        config = LinkConfig(f"{s}-{t}", part, "127.0.0.1", "127.0.0.1")
        port = decode.ask(t, "take_from", config)
        prefill.ask(s, "connect", config, port)
        names[s].append(config.name)
    return names


def send(prefill: Group, names: list[list[str]], number: int, lease: int, first: int, blocks: list[int]) -> list[Any]:
    for rank in range(prefill.size):
        prefill.ask(rank, "send", SendOrder(number, lease, first, tuple(blocks), tuple(names[rank])))
    reports = []
    for rank in range(prefill.size):
        (report,) = prefill.ask(rank, "reports", 30.0)
        assert report.number == number
        reports.append(report)
    return reports


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("senders", "takers"),
    [*(pytest.param(*degrees, marks=SLOW) for degrees in ((1, 1), (2, 1), (1, 2))), (2, 3)],
)
def test_decode_goes_on_from_kv_that_was_moved(tmp_path: Path, senders: int, takers: int) -> None:
    """In pieces, the first while the prompt is still being computed; then again with a stale lease, which changes
    nothing."""
    folder = save_tiny(tmp_path)
    prefill, decode = Group(folder, senders), Group(folder, takers)
    try:
        prefill.ready()
        decode.ready()
        names = link(prefill, decode)
        places = (21, 3, 17, 8)
        decode.ask_all("open", 7, places)
        blocks, _ = prefill.ask_all("prefill", SEEDED, [20, 13])[0]
        first = send(prefill, names, 100, 7, 0, blocks[:2])
        blocks, tokens = prefill.ask_all("prefill", SEEDED, [20])[0]
        rest = send(prefill, names, 101, 7, 2, blocks[2:])
        assert not any(report.error for report in first + rest)
        layers, block_bytes = 3, 16 * 3 * 8 * 4  # tokens, KV heads, head_dim, float32
        assert sum(report.bytes for report in first + rest) == 4 * 2 * layers * block_bytes
        assert all(report.seconds > 0 for report in first + rest)
        decode.ask_all("close", 7)
        assert all(report.error == STALE for report in send(prefill, names, 102, 7, 0, blocks[2:]))
        admission = Admission(2, tuple(tokens), len(PROMPT), SEEDED, computed=len(PROMPT), blocks=places)
        moved = decode.ask_all("decode", admission, 20)
        stayed = prefill.ask_all("prefill", SEEDED, [1] * 20)[0][1][len(PROMPT) + 1 :]
        assert all(tokens == stayed for tokens in moved)
    finally:
        prefill.end()
        decode.end()


def test_a_dead_taker_fails_what_is_sent_to_it_and_a_new_one_is_linked(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    prefill, decode = Group(folder, 1), Group(folder, 1)
    try:
        prefill.ready()
        decode.ready()
        names = link(prefill, decode)
        blocks, tokens = prefill.ask(0, "prefill", SamplingParams(temperature=0.0), [53])
        os.kill(decode.processes[0].pid or 0, signal.SIGKILL)
        decode.processes[0].join()
        (report,) = send(prefill, names, 1, 1, 0, blocks)
        assert "link 0-0" in report.error
        (report,) = send(prefill, names, 2, 1, 0, blocks)
        assert "link 0-0" in report.error, "it stays broken until it is made again"
        decode.end()
        decode = Group(folder, 1)
        decode.ready()
        assert link(prefill, decode) == names
        decode.ask(0, "open", 2, (9, 8, 7, 6))
        (report,) = send(prefill, names, 3, 2, 0, blocks)
        assert not report.error
        admission = Admission(0, tuple(tokens), 53, SamplingParams(temperature=0.0), 53, (9, 8, 7, 6))
        assert tokens[53:] + decode.ask(0, "decode", admission, 9) == reference_tokens(folder, PROMPT, 10)
    finally:
        prefill.end()
        decode.end()


# Within one process.


def cache(heads: int, blocks: int = 12) -> KvCache:
    kv = KvCache(2, blocks, 4, heads, 8, torch.float32, torch.device("cpu"))
    (plane,) = kv.planes
    plane.copy_(torch.arange(plane.numel()).view_as(plane))
    return kv


def pair(heads: int = 2) -> tuple[KvTransfer, KvTransfer, KvCache, KvCache]:
    """A sender and a taker of this process, linked."""
    here, there = cache(heads), KvCache(2, 12, 4, heads, 8, torch.float32, torch.device("cpu"))
    cpu, part = torch.device("cpu"), Part(0, heads)
    sender = KvTransfer(HostPages(here.planes), part, cpu, time.perf_counter)
    taker = KvTransfer(HostPages(there.planes), part, cpu, time.perf_counter)
    config = LinkConfig("l", part, "127.0.0.1", "127.0.0.1")
    sender.connect(config, taker.take_from(config))
    return sender, taker, here, there


def test_a_lease_that_was_closed_is_refused_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, taker, here, there = pair()
    taker.open(1, (5, 6, 7))
    sender.send(SendOrder(10, 1, 0, (0, 1, 2), ("l",)))
    (report,) = sender.reports(10)
    assert (report.error, report.bytes) == ("", 3 * 4 * 4 * 2 * 8 * 4)
    assert torch.equal(there.planes[0][:, :, 5:8], here.planes[0][:, :, 0:3])
    for never_opened_or_outside in (SendOrder(11, 2, 0, (0,), ("l",)), SendOrder(12, 1, 2, (0, 1), ("l",))):
        sender.send(never_opened_or_outside)
        (report,) = sender.reports(10)
        assert report.error == STALE
    reading, go_on = threading.Event(), threading.Event()
    read = HostPages.read

    def slow(self: HostPages, blocks: Any, heads: Part) -> torch.Tensor:
        reading.set()
        go_on.wait(10)
        return read(self, blocks, heads)

    monkeypatch.setattr(HostPages, "read", slow)
    before = there.planes[0].clone()
    sender.send(SendOrder(13, 1, 0, (3,), ("l",)))
    sender.send(SendOrder(14, 1, 0, (4,), ("l",)))
    assert reading.wait(10)
    closing = threading.Thread(target=sender.close, args=(13,))
    closing.start()
    taker.close(1)
    closing.join(0.2)
    assert closing.is_alive(), "closing waits for the copy that is being made"
    go_on.set()
    closing.join(10)
    errors = [report.error for _ in range(2) for report in sender.reports(10)]
    assert errors[:2] == [STALE] * len(errors[:2])
    assert torch.equal(there.planes[0], before), "nothing was written after the taker had closed"
    sender.send(SendOrder(15, 1, 0, (3,), ("no such link",)))
    assert "no link" in sender.reports(10)[0].error


def test_an_order_goes_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kv_transfer.MESSAGE_BYTES", 1)
    sender, taker, here, there = pair()
    taker.open(1, tuple(range(12)))
    sender.send(SendOrder(1, 1, 0, tuple(range(11, -1, -1)), ("l",)))
    assert sender.reports(10)[0].error == ""
    assert torch.equal(here.planes[0].flip(2), there.planes[0])


@given(heads=st.integers(1, 12), senders=st.integers(1, 12), takers=st.integers(1, 12))
def test_every_head_goes_over_exactly_one_link_to_who_has_it(heads: int, senders: int, takers: int) -> None:
    if heads < max(senders, takers):
        return
    found = overlaps(heads, senders, takers)
    assert sorted(head for *_, part in found for head in range(part.start, part.stop)) == list(range(heads))
    for s, t, part in found:
        for whole in (split(heads, senders)[s], split(heads, takers)[t]):
            assert whole.start <= part.start < part.stop <= whole.stop


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_the_pages_hold_moves(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]))

    def some() -> KvCache:
        kv = KvCache(2, 9, 4, 3, 8, dtype, torch.device("cpu"))
        for plane in byte_planes(kv.planes):
            plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8))
        return kv

    here, there = some(), some()
    start = data.draw(st.integers(0, 2))
    heads = Part(start, data.draw(st.integers(start + 1, 3)))
    blocks, places = (data.draw(st.permutations(range(9)))[:4] for _ in range(2))
    content = HostPages(here.planes).read(blocks, heads)
    assert torch.equal(content, gather(byte_planes(here.planes), blocks, heads)), "host and device pages speak alike"
    assert content.numel() == 4 * HostPages(here.planes).block_bytes(heads.size)
    assert HostPages(here.planes).block_bytes(3) == bytes_per_block(2, 4, 3, 8, dtype)
    wanted, other = ([plane.clone() for plane in byte_planes(there.planes)] for _ in range(2))
    for old, sent in zip(wanted, byte_planes(here.planes), strict=True):
        old[:, places, :, start : heads.stop] = sent[:, blocks, :, start : heads.stop]
    HostPages(there.planes).write(places, heads, content)
    scatter(other, places, heads, content)
    for now, same, right in zip(byte_planes(there.planes), other, wanted, strict=True):
        assert torch.equal(now, right), "these blocks and heads, and nothing else"
        assert torch.equal(same, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_pages_on_cuda_by_shape(dtype: torch.dtype) -> None:
    """What a device copies, under fake tensors of device cuda."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        kv = KvCache(2, 9, 256, 3, 64, dtype, torch.device("cuda:0"))
        planes = byte_planes(kv.planes)
        content = gather(planes, [4, 2, 7], Part(1, 3))
        assert (content.dtype, content.device.type) == (torch.uint8, "cuda")
        assert content.numel() == 3 * bytes_per_block(2, 256, 2, 64, dtype)
        scatter(planes, [0, 1, 2], Part(1, 3), content)
