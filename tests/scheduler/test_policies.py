"""The policies' exact behaviour on the examples that define them."""

from __future__ import annotations

import pytest

from scheduler.budget import StaticBudget
from scheduler.plan import Segment
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.world import VOCAB, Run


def run_with(policy: str, chunk_size: int = 512, max_batched_tokens: int = 8192) -> Run:
    config = SchedulerConfig(
        num_blocks=4096, block_size=16, max_model_len=16384, vocab_size=VOCAB, max_running=32, prefix_caching=False
    )  # prompts that are alike here stand for different ones
    return Run.of(Scheduler(config, make_policy(policy, chunk_size=chunk_size, max_batched_tokens=max_batched_tokens)))


def request(name: str, prompt: int, max_tokens: int = 500) -> Request:
    return Request(name, tuple(i % VOCAB for i in range(prompt)), max_tokens, SamplingParams(temperature=0.0))


def start_streams(run: Run, names: str, prompt: int = 8) -> dict[str, int]:
    """Streams that decode, and the slot of each."""
    for name in names:
        run.add(request(name, prompt))
    while not all(run.got.get(name) for name in names):
        run.step()
    return {sequence.request_id: sequence.slot for sequence in run.scheduler.running}


def shape(ran: list[list[Segment]], names: dict[int, str]) -> list[list[tuple[str, int]]]:
    return [[(names[s.slot], s.count) for s in forward] for forward in ran]


@pytest.mark.parametrize("streams", ["", "A", "ABCDEFGH"])
def test_chunked_takes_4096_tokens_in_8_iterations_that_carry_every_decode(streams: str) -> None:
    run = run_with("chunked", chunk_size=512)
    slots = start_streams(run, streams)
    run.add(request("N", 4096))
    for k in range(8):
        plan = run.step()
        assert plan is not None
        assert len(plan.forwards) == 1, "one fused forward"
        chunks = [s for s in run.segments if s.slot not in slots.values()]
        decodes = [s for s in run.segments if s.slot in slots.values()]
        assert [(s.start, s.count, s.sample) for s in chunks] == [(512 * k, 512, k == 7)]
        assert sorted(s.slot for s in decodes) == sorted(slots.values())
        assert all(s.count == 1 and s.sample for s in decodes)
        assert run.segments[: len(decodes)] == decodes, "decodes first"
    assert len(run.got["N"]) == 1


def test_alternate_is_one_chunk_then_one_stream_in_turn() -> None:
    run = run_with("alternate", chunk_size=50)
    slots = start_streams(run, "ABCD")
    while run.step() and run.segments[-1].slot != slots["D"]:
        pass  # until D was served last, so that A is next
    run.add(request("N", 200))
    before = len(run.plans)
    for _ in range(6):
        run.step()
    slots = {s.request_id: s.slot for s in run.scheduler.running}
    names = {slot: name for name, slot in slots.items()}
    assert [shape(ran, names) for ran in run.ran[before:]] == [
        [[("N", 50)], [("A", 1)]],
        [[("N", 50)], [("B", 1)]],
        [[("N", 50)], [("C", 1)]],
        [[("N", 50)], [("D", 1)]],
        [[("N", 1)]],
        [[("A", 1)]],
    ]


def test_whole_stalls_every_stream_for_the_whole_prompt() -> None:
    run = run_with("whole")
    slots = start_streams(run, "ABCD")
    run.step()
    run.add(request("N", 4096))
    plan = run.step()
    assert plan is not None
    assert [(s.start, s.count, s.sample) for s in run.segments] == [(0, 4096, True)]
    after = run.step()
    assert after is not None
    assert {s.slot for s in run.segments} >= set(slots.values())


def test_whole_packs_waiting_prompts_up_to_the_batch_and_still_takes_a_longer_one_whole() -> None:
    run = run_with("whole", max_batched_tokens=1000)
    for name, length in (("A", 600), ("B", 400), ("C", 1), ("D", 3000)):
        run.add(request(name, length, max_tokens=4))
    counts = []
    while len(run.ended) < 4:
        plan = run.step()
        assert plan is not None
        counts.append([s.count for s in run.segments])
    prefills = [c for c in counts if max(c) > 1 or len(c) == 1]
    assert [600, 400] in prefills
    assert any(3000 in c for c in counts)


def test_whole_gives_the_streams_an_iteration_between_two_prompts() -> None:
    run = run_with("whole", max_batched_tokens=100)
    start_streams(run, "A")
    for i in range(20):
        run.add(request(f"N{i}", 100, max_tokens=2))
    before = len(run.got["A"])
    for _ in range(20):
        run.step()
    assert len(run.got["A"]) - before >= 9


def test_chunked_shares_a_budget_among_several_prompts_in_order_of_arrival() -> None:
    run = run_with("chunked", chunk_size=100)
    for name, length in (("A", 130), ("B", 40), ("C", 90)):
        run.add(request(name, length))
    shapes = []
    for _ in range(3):
        plan = run.step()
        assert plan is not None
        names = {s.slot: s.request_id for s in run.scheduler.running}
        shapes.append(shape(run.ran[-1], names))
    assert shapes[0] == [[("A", 100)]]
    assert shapes[1] == [[("A", 30), ("B", 40), ("C", 30)]]
    assert shapes[2] == [[("A", 1), ("B", 1), ("C", 60)]]


def test_unknown_policies_and_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="choose one of whole, alternate, chunked, slo"):
        make_policy("magic")
    with pytest.raises(ValueError, match="at least 1"):
        StaticBudget(0)
    with pytest.raises(ValueError, match="at least 1"):
        make_policy("whole", max_batched_tokens=0)
