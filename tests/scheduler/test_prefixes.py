"""Prefix reuse: who finds what, who waits for whom, and what must never be found."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from scheduler.blocks import BlockPool
from scheduler.budget import Batch
from scheduler.plan import NO_TOKEN, IterationResult
from scheduler.policies import Mix, make_policy
from scheduler.prefixes import PATIENCE
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.slo import Promise
from tests.scheduler.world import VOCAB, Run, expected_tokens

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=200, vocab_size=VOCAB, max_running=8)
PROMPT = tuple(range(1, 23))  # five blocks and two tokens


def fresh(chunk_size: int = 100, **changes: object) -> Run:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return Run.of(Scheduler(config, make_policy("chunked", chunk_size=chunk_size), b"key"))


def serve(run: Run, request: Request) -> int:
    """To its end. How many of its prompt's tokens were cached."""
    run.add(request)
    run.drain()
    assert run.got[request.request_id] == expected_tokens(request)
    return run.cached[request.request_id]


def cached_after(first: Request, second: Request) -> int:
    run = fresh()
    assert serve(run, first) == 0
    return serve(run, second)


def test_a_second_request_computes_only_what_it_does_not_share() -> None:
    run = fresh()
    serve(run, Request("a", PROMPT, 3))
    assert serve(run, Request("b", (*PROMPT[:13], 90, 91), 3)) == 12, "three whole blocks are alike"
    assert run.worker.reused == 12
    first = next(plan for plan in run.plans if plan.iteration == 4)
    assert first.forwards[0].chunks[0].start == 12


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (22, 20)])
def test_one_token_at_least_is_computed(length: int, cached: int) -> None:
    assert cached_after(Request("a", PROMPT, 2), Request("b", PROMPT[:length], 2)) == cached


def test_a_conversation_finds_what_was_generated() -> None:
    first = Request("turn-1", PROMPT, 15)
    answer = tuple(expected_tokens(first))
    # The last token was never computed, so that 36 of 37 tokens have KV: nine blocks.
    assert cached_after(first, Request("turn-2", (*PROMPT, *answer, 5, 6, 7), 4)) == 36


def test_a_restarted_request_finds_its_prompt_and_what_it_had_produced() -> None:
    whole = Request("r", PROMPT, 20)
    produced = tuple(expected_tokens(whole)[:10])
    run = fresh()
    serve(run, Request("other", (*PROMPT, *produced), 2))
    run.add(replace(whole, produced=produced))
    run.drain()
    assert run.got["r"] == expected_tokens(whole)[10:]
    assert run.worker.reused == 28, "seven blocks of 32 tokens"
    assert run.cached["r"] == 22, "of these only the prompt's are prompt tokens"


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    run = fresh()
    run.add(Request("r", PROMPT, 20))
    for _ in range(10):
        run.step()
    assert len(run.got["r"]) == 10
    run.scheduler._preempt(run.scheduler.running[0], "kv_blocks")
    run.step()
    assert (run.segments[0].start, run.segments[0].count) == (28, 4), "of 31 tokens with KV seven blocks were full"
    run.drain()
    assert run.got["r"] == expected_tokens(Request("r", PROMPT, 20))
    assert run.cached["r"] == 0, "its own blocks are no news to its client"
    assert run.scheduler.stats()["prefix_tokens_hit"] == 0


def test_tenants_are_apart() -> None:
    a, b = Request("a", PROMPT, 2, cache_salt="one"), Request("b", PROMPT, 2, cache_salt="two")
    assert cached_after(a, b) == 0
    assert cached_after(a, replace(a, request_id="c")) == 20
    assert cached_after(a, replace(b, cache_salt="")) == 0


def test_digests_depend_on_the_key_the_salt_and_every_token_before() -> None:
    def digests(prompt: tuple[int, ...], salt: str = "", key: bytes = b"key") -> list[bytes]:
        run = Run.of(Scheduler(CONFIG, make_policy("chunked"), key))
        run.add(Request("r", prompt, 2, cache_salt=salt))
        sequence = run.scheduler.waiting[0]
        run.drain()
        assert all(len(digest) == 16 for digest in sequence.digests)
        return sequence.digests[:5]

    plain = digests(PROMPT)
    assert digests(PROMPT) == plain
    others = [digests(PROMPT, key=b"another"), digests(PROMPT, "salt"), digests((9, *PROMPT[1:]))]
    assert len({digest for each in (plain, *others) for digest in each}) == 20


def test_without_it_nothing_is_found() -> None:
    run = fresh(prefix_caching=False)
    serve(run, Request("a", PROMPT, 3))
    assert serve(run, Request("b", PROMPT, 3)) == 0
    assert run.scheduler.pool.free == CONFIG.num_blocks


def test_cached_blocks_are_given_away_least_recently_used_first_and_the_ends_before_the_beginnings() -> None:
    run = fresh(num_blocks=12)
    serve(run, Request("a", tuple(range(1, 18)), 2))  # 4 blocks and the beginning of a fifth
    serve(run, Request("b", tuple(range(31, 48)), 2))
    assert (run.scheduler.pool.free, run.scheduler.pool.cached) == (4, 8)
    assert serve(run, Request("c", tuple(range(1, 18)), 2)) == 16  # a's are the recent ones now
    assert serve(run, Request("d", tuple(range(61, 80)), 7)) == 0
    assert run.scheduler.pool.evictions == 3, "four blocks were free, seven needed"
    assert serve(run, Request("e", tuple(range(31, 48)), 1)) == 4, "b's beginning is left"
    run.scheduler.check()


def test_those_with_the_same_prompt_wait_for_the_first_and_share() -> None:
    run = fresh(chunk_size=8)
    requests = [Request(f"r{choice}", PROMPT, 6, SamplingParams(choice=choice)) for choice in range(4)]
    for request in requests:
        run.add(request)
    run.drain()
    prefilled = sum(s.count for ran in run.ran for forward in ran for s in forward if s.start < len(PROMPT))
    assert prefilled == 22 + 3 * 2, "the first computes all of it, the others what is left after its full blocks"
    assert [run.cached[f"r{choice}"] for choice in range(4)] == [0, 20, 20, 20]
    for request in requests:
        assert run.got[request.request_id] == expected_tokens(request)


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_who_waits_goes_on_alone_when_the_first_is_gone(how: str) -> None:
    run = fresh(chunk_size=4)
    run.add(Request("first", PROMPT, 6))
    run.add(Request("second", (*PROMPT, 50), 6))
    run.step()
    first, second = run.scheduler.running
    assert (first.computed, second.computed) == (4, 0)
    if how == "abort":
        run.abort("first")
    else:
        run.scheduler._preempt(first, "kv_blocks")
    run.drain()
    assert run.got["second"] == expected_tokens(Request("second", (*PROMPT, 50), 6))


def test_nobody_waits_for_one_that_gets_nothing() -> None:
    """A policy that never lets the oldest run: those that wait for it take over."""

    class OnlyLater:
        urgency = None

        def __init__(self) -> None:
            self.inner = make_policy("chunked", chunk_size=8)
            self.name, self.decision, self.victim = "later", self.inner.decision, self.inner.victim

        def compose(self, batch: Batch) -> list[Mix]:
            later = [sequence for sequence in batch.prefills if sequence.request_id != "first"]
            return self.inner.compose(batch._replace(prefills=later))

    run = fresh()
    run.scheduler.policy = OnlyLater()  # type: ignore[assignment]
    run.add(Request("first", PROMPT, 6))
    run.add(Request("second", PROMPT, 6))
    run.add(Request("busy", tuple(range(60, 90)), 60))
    for _ in range(PATIENCE + 12):
        run.step()
    assert "second" in run.got


def test_the_tighter_promise_leads() -> None:
    run = fresh(chunk_size=20)
    run.add(Request("other", tuple(range(60, 90)), 9))
    run.add(Request("patient", PROMPT, 4, promise=Promise(100, 1)))
    run.add(Request("urgent", PROMPT, 4, promise=Promise(1, 1)))
    run.step()
    assert [sequence.request_id for sequence in run.scheduler._batch(run.now).prefills] == ["other", "urgent"]
    run.drain()
    assert run.got["patient"] == run.got["urgent"] == expected_tokens(Request("r", PROMPT, 4))


def test_the_oldest_waits_for_nobody() -> None:
    run = fresh(chunk_size=4)
    run.add(Request("oldest", PROMPT, 4, promise=Promise(100, 1)))
    run.add(Request("urgent", PROMPT, 4, promise=Promise(1, 1)))
    run.step()
    assert "oldest" in [sequence.request_id for sequence in run.scheduler._batch(run.now).prefills]
    run.drain()
    assert run.got["oldest"] == run.got["urgent"] == expected_tokens(Request("r", PROMPT, 4))


def test_blocks_of_a_plan_under_way_are_shared_only_once_it_is_committed() -> None:
    run = fresh()
    run.add(Request("a", PROMPT, 4))
    under_way: deque[IterationResult] = deque()
    plan = run.scheduler.schedule(1.0)
    assert plan is not None
    under_way.append(run.worker.execute(plan))
    run.add(Request("b", (*PROMPT[:20], 70, 71), 4))
    second = run.scheduler.schedule(2.0)
    assert second is not None
    assert second.forwards[0].chunks == (), "b waits for the plan under way"
    under_way.append(run.worker.execute(second))
    run.take(run.scheduler.commit(under_way.popleft(), 2.0))
    third = run.scheduler.schedule(3.0)
    assert third is not None
    assert third.forwards[0].chunks[0].start == 20
    under_way.append(run.worker.execute(third))
    while under_way:
        run.take(run.scheduler.commit(under_way.popleft(), 3.0))
    run.drain()
    assert run.got["b"] == expected_tokens(Request("b", (*PROMPT[:20], 70, 71), 4))


def test_a_plan_under_way_says_nothing_of_blocks_that_were_taken_away_since() -> None:
    """A prompt is preempted while its chunk is under way, and is back with other blocks before that is committed."""
    run = fresh(chunk_size=16)
    run.add(Request("r", PROMPT, 4))
    first = run.scheduler.schedule(1.0)
    assert first is not None
    result = run.worker.execute(first)
    run.scheduler._preempt(run.scheduler.running[0], "kv_blocks")
    run.scheduler.policy = make_policy("chunked", chunk_size=4)
    second = run.scheduler.schedule(2.0)
    assert second is not None
    run.take(run.scheduler.commit(result, 2.0))
    run.take(run.scheduler.commit(run.worker.execute(second), 3.0))
    run.add(Request("s", (*PROMPT, 5), 4))
    run.drain()
    assert run.cached["s"] <= 20
    assert run.got["s"] == expected_tokens(Request("s", (*PROMPT, 5), 4))


def test_what_a_failed_sequence_computed_is_not_shared() -> None:
    run = fresh(chunk_size=8)
    run.add(Request("bad", PROMPT, 4))
    run.step()
    run.step()
    assert len(run.scheduler._sequences) == 1
    plan = run.scheduler.schedule(3.0)
    assert plan is not None
    run.worker.execute(plan)
    failed = IterationResult(plan.iteration, (NO_TOKEN,), errors=((0, "not finite"),))
    run.take(run.scheduler.commit(failed, 3.0))
    assert run.ended["bad"].finish is Finish.ERROR
    assert run.scheduler.pool.free == CONFIG.num_blocks
    assert serve(run, Request("next", PROMPT, 4)) == 0


@pytest.mark.parametrize("how", ["requeue_all", "fail_all"])
def test_new_workers_know_nothing(how: str) -> None:
    run = fresh()
    serve(run, Request("before", PROMPT, 4))
    run.add(Request("running", tuple(range(40, 60)), 9))
    run.step()
    if how == "requeue_all":
        run.scheduler.requeue_all()
    else:
        run.scheduler.fail_all("lost")
    run.take(run.scheduler.take_deltas())
    run.worker.replace()
    run.scheduler.check()
    assert run.scheduler.pool.cached == 0
    assert serve(run, Request("after", PROMPT, 4)) == 0


def test_figures() -> None:
    run = fresh(num_blocks=12)
    serve(run, Request("a", PROMPT, 3))
    serve(run, Request("b", PROMPT, 3))
    stats = run.scheduler.stats()
    assert (stats["prefix_tokens_queried"], stats["prefix_tokens_hit"]) == (44, 20)
    assert stats["blocks"] == {"free": 6, "cached": 6, "referenced": 0}
    assert stats["blocks_free"] == stats["blocks_total"] == 12
    assert stats["preemptions_by_cause"] == {"kv_blocks": 0, "workers_lost": 0}
    assert stats["violations"] == 0


def test_an_audit_counts_what_broke_and_goes_on() -> None:
    run = fresh()
    assert run.scheduler.audit() is None
    run.scheduler.pool.allocate(1)  # by nobody
    told = run.scheduler.audit()
    assert told is not None
    assert "1 are referenced" in told
    assert run.scheduler.stats()["violations"] == 1


def test_the_pool_shares_only_what_is_known() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(2)
    assert blocks is not None
    with pytest.raises(ValueError, match="nothing that is known"):
        pool.share(blocks)
    pool.know(blocks[0], b"one")
    pool.know(blocks[1], b"one")
    assert pool.find(b"one") == blocks[0], "the first of two that are alike"
    pool.share(blocks[:1])
    pool.check([blocks, blocks[:1]])
    pool.release(blocks)
    pool.release(blocks[:1])
    assert (pool.free, pool.cached, pool.referenced) == (2, 1, 0)
    with pytest.raises(ValueError, match="is not referenced"):
        pool.release(blocks[:1])
    with pytest.raises(ValueError, match="is not referenced"):
        pool.know(blocks[1], b"two")
    with pytest.raises(ValueError, match="twice"):
        pool.check([[0, 0]])
    with pytest.raises(ValueError, match="held by sequences"):
        pool.check([[0]])
