"""KV that is kept in host memory while its sequence waits: nothing is computed twice, lost, or left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from scheduler.plan import IterationPlan
from scheduler.policies import make_policy
from scheduler.request import Finish, Request, Sequence
from scheduler.residents import MOST_PREEMPTIONS, settled
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.test_reuse import BLOCKS, ReuseMachine, World
from tests.scheduler.world import VOCAB, Run, expected_tokens

CONFIG = SchedulerConfig(
    num_blocks=8,
    block_size=4,
    max_model_len=32,
    vocab_size=VOCAB,
    max_running=4,
    prefix_caching=False,
    swap_blocks=8,
)
OLD, YOUNG = Request("old", (1,) * 10, 16), Request("young", (2,) * 10, 10)


def under_pressure(**changes: object) -> Run:
    """Two sequences that grow until the younger has given way and waits."""
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    run = Run.of(Scheduler(config, make_policy("chunked", chunk_size=64)))
    run.add(OLD)
    run.add(YOUNG)
    run.step()
    while not run.scheduler.waiting:
        assert run.step() is not None
    return run


def computed_in(run: Run, since: int) -> int:
    """Tokens that the plans after the first `since` computed."""
    return sum(segment.count for ran in run.ran[since:] for forward in ran for segment in forward)


def waiting(run: Run) -> Sequence:
    return run.scheduler.waiting[0]


def swaps_of(plan: IterationPlan) -> list[bool]:
    return [swap.to_host for swap in plan.swaps]


def test_what_was_computed_is_copied_out_and_back_and_not_computed_again() -> None:
    run = under_pressure()
    victim = waiting(run)
    assert victim.request_id == "young"
    kept = victim.kept_tokens
    assert kept == victim.length - 1 > 10, "all but the token that was sampled last"
    assert len(victim.kept) == -(-kept // 4) == run.scheduler.stats()["swapped_out"]
    assert swaps_of(run.plans[-1]) == [True]
    before, outstanding = len(run.ran), sum(s.outstanding for s in (*run.scheduler.running, victim))
    run.drain()
    assert computed_in(run, before) == outstanding - kept - 2, "each once, and the last ones of all need no KV"
    assert {name: run.got[name] for name in ("old", "young")} == {
        request.request_id: expected_tokens(request) for request in (OLD, YOUNG)
    }
    stats = run.scheduler.stats()
    assert stats["swapped_in"] == stats["swapped_out"] > 0
    assert stats["swap_blocks"] == {"free": 8, "used": 0}


def test_it_comes_back_only_where_its_whole_context_fits() -> None:
    run = under_pressure()
    victim = waiting(run)
    while run.scheduler.waiting:
        fits = run.scheduler.pool.available >= -(-victim.length // 4) + len(run.scheduler.running)
        run.step()
        assert fits is not bool(run.scheduler.waiting)
    assert swaps_of(run.plans[-1]) == [False]


def test_where_the_host_has_no_room_it_is_computed_again() -> None:
    run = under_pressure(swap_blocks=2)
    assert waiting(run).kept == []
    run.drain()
    assert run.got["young"] == expected_tokens(YOUNG)
    assert run.scheduler.stats()["swapped_out"] == 0


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    run = under_pressure(prefix_caching=True)
    kept = len(waiting(run).kept)
    run.abort("old")  # before it took what is cached of the other
    run.step()
    stats = run.scheduler.stats()
    assert 0 < stats["swapped_in"] < kept
    assert stats["swap_blocks"]["used"] == 0
    run.drain()
    assert run.got["young"] == expected_tokens(YOUNG)


def test_an_abort_frees_the_host() -> None:
    run = under_pressure()
    assert run.scheduler.host.free < 8
    run.abort("young")
    run.scheduler.check()
    assert run.scheduler.host.free == 8
    run.drain()
    assert run.ended["young"].finish is Finish.ABORT
    assert run.got["old"] == expected_tokens(OLD)


def test_lost_workers_take_what_is_kept_with_them() -> None:
    run = under_pressure()
    run.scheduler.requeue_all()
    run.worker.replace()
    run.scheduler.check()
    assert run.scheduler.host.free == 8
    assert all(not s.kept and s.kept_tokens == 0 for s in run.scheduler.waiting)
    run.drain()
    assert (run.got["old"], run.got["young"]) == (expected_tokens(OLD), expected_tokens(YOUNG))


def test_swaps_that_nobody_heard_of_end_with_the_workers() -> None:
    run = under_pressure(swap_blocks=16)
    run.scheduler.host.keep(run.scheduler.running[0])  # decided, and in no plan yet
    run.scheduler.host.forget(run.scheduler.running[0])
    run.scheduler.requeue_all()
    run.worker.replace()
    plan = run.step()
    assert plan is not None
    assert plan.swaps == ()


def test_a_host_block_that_is_lost_is_told() -> None:
    run = under_pressure()
    waiting(run).kept.pop()
    with pytest.raises(ValueError, match="host blocks lost"):
        run.scheduler.check()


def test_who_has_given_way_often_enough_gets_all_that_it_can_ever_want() -> None:
    run = under_pressure()
    waiting(run).gave_way = MOST_PREEMPTIONS
    while run.scheduler.waiting:
        run.step()
    young = next(s for s in run.scheduler.running if s.request_id == "young")
    assert len(young.blocks) == 5, "of its 20 tokens in the end"
    assert settled(young)
    run.drain()
    assert run.got["young"] == expected_tokens(YOUNG)


def test_one_that_outgrows_the_pool_ends_alone_even_so() -> None:
    run = Run.of(Scheduler(replace(CONFIG, num_blocks=4), make_policy("chunked", chunk_size=64)))
    run.add(Request("big", (1,) * 10, 20))
    run.scheduler.waiting[0].gave_way = MOST_PREEMPTIONS
    run.add(Request("next", (2,) * 6, 3))
    run.step()
    assert len(run.scheduler.running) == 1, "it has the whole pool"
    run.drain()
    assert run.ended["big"].reason == "kv_capacity"
    assert run.got["next"] == expected_tokens(Request("next", (2,) * 6, 3))


class SwapMachine(ReuseMachine):
    """Prefix reuse under everything at once, and what gives way is kept on the host, where that has room."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(BLOCKS, 2, swap_blocks=9)


TestSwap = SwapMachine.TestCase
TestSwap.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
