"""What may wait, by number and by tokens."""

from __future__ import annotations

import pytest

from scheduler.errors import RequestRefused
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig


def scheduler(**bounds: int) -> Scheduler:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=200, vocab_size=97, max_running=1, **bounds)
    return Scheduler(config, make_policy("chunked", chunk_size=7))


def request(number: int, tokens: int, produced: int = 0) -> Request:
    return Request(f"r{number}", (1,) * tokens, 20, produced=(2,) * produced)


def test_a_bound_on_tokens_that_wait() -> None:
    full = scheduler(max_queued_tokens=100)
    full.add(request(0, 60), 0.0)
    full.add(request(1, 30, produced=10), 0.0)
    with pytest.raises(RequestRefused, match="100 tokens are waiting to be computed, and 1 more") as refused:
        full.add(request(2, 1), 0.0)
    assert refused.value.code == "queue_full"
    assert full.schedule(0.0) is not None, "the first one runs now, and waits no more"
    full.add(request(3, 60), 0.0)


def test_a_prompt_above_the_bound_is_taken_where_nobody_waits() -> None:
    empty = scheduler(max_queued_tokens=50)
    empty.add(request(0, 60), 0.0)
    with pytest.raises(RequestRefused):
        empty.add(request(1, 1), 0.0)


def test_what_was_admitted_before_is_not_refused_again() -> None:
    full = scheduler(max_queued_requests=1, max_queued_tokens=50)
    full.add(request(0, 60), 0.0)
    full.add(request(1, 60, produced=3), 0.0, again=True)
    assert [sequence.request_id for sequence in full.waiting] == ["r0", "r1"]
    with pytest.raises(RequestRefused, match="2 requests are waiting"):
        full.add(request(2, 60), 0.0)


def of(tenant: str, number: int, weight: float = 1.0, tokens: int = 4) -> Request:
    return Request(f"{tenant}{number}", (1,) * tokens, 20, tenant=tenant, weight=weight)


def test_a_full_queue_has_room_for_a_tenant_that_has_less_than_its_share() -> None:
    full = scheduler(max_queued_requests=8)
    for number in range(8):
        full.add(of("a", number), 0.0)
    with pytest.raises(RequestRefused):
        full.add(of("a", 8), 0.0)
    for number in range(4):
        full.add(of("b", number), 0.0)
    with pytest.raises(RequestRefused, match="12 requests are waiting"):
        full.add(of("b", 4), 0.0)
    with pytest.raises(RequestRefused):
        full.add(of("a", 9), 0.0)


def test_so_it_is_with_tokens_and_by_weight() -> None:
    full = scheduler(max_queued_tokens=100)
    for number in range(5):
        full.add(of("a", number, tokens=20), 0.0)
    for number in range(3):
        full.add(of("b", number, weight=3.0, tokens=25), 0.0)
    with pytest.raises(RequestRefused):
        full.add(of("b", 3, weight=3.0, tokens=1), 0.0)


def test_a_tenant_that_floods_does_not_keep_another_from_entering() -> None:
    run = scheduler(max_queued_requests=50)
    for number in range(50):
        run.add(of("a", number), 0.0)
    run.add(of("b", 0), 0.0)
    assert [s.request_id for s in run.waiting[:3]] == ["a0", "b0", "a1"]
