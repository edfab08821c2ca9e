"""Whatever arrives, is aborted or runs out of blocks: each token once, within budget, nothing lost, none starved."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.plan import IterationResult, Segment
from scheduler.policies import POLICIES, Policy, make_policy
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import KV_CAPACITY, Scheduler, SchedulerConfig
from tests.scheduler.world import VOCAB, Run, expected_scores, expected_tokens

policies = st.sampled_from(sorted(POLICIES))
COST = Coefficients(0.002, 0.04, 0.0025, 1e-6, 1e-7, 1e-4, 2.0)


@st.composite
def setups(draw: st.DrawFn) -> tuple[SchedulerConfig, str, int]:
    config = SchedulerConfig(
        num_blocks=draw(st.integers(1, 24)),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        max_model_len=draw(st.integers(8, 120)),
        vocab_size=VOCAB,
        max_running=draw(st.integers(1, 6)),
        max_queued_requests=64,
        swap_blocks=draw(st.sampled_from([0, 0, 3, 30])),
    )
    return config, draw(policies), draw(st.integers(1, 20))


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    prompt = tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)))
    stops = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)))
    sampling = SamplingParams(prompt_logprobs=draw(st.sampled_from([None, None, 0])))
    return Request(name, prompt, draw(st.integers(0, 30)), sampling, stops)


def policy_of(name: str, chunk_size: int) -> Policy:
    cost = OnlineCostModel(COST)
    return make_policy(name, chunk_size=chunk_size, max_batched_tokens=chunk_size, cost=cost)


def build(setup: tuple[SchedulerConfig, str, int]) -> Run:
    config, policy, chunk_size = setup
    return Run.of(Scheduler(config, policy_of(policy, chunk_size)))


def check_budget(ran: list[list[Segment]], policy: str, chunk_size: int, decoding: set[int]) -> None:
    """No chunk is larger than its budget; `whole` may exceed it only for a prompt that alone is longer."""
    segments = [segment for forward in ran for segment in forward]
    prefill = [s.count for s in segments if s.slot not in decoding]
    if policy == "whole":
        assert len(prefill) <= 1 or sum(prefill) <= chunk_size
        assert not prefill or len(prefill) == len(segments)
    else:
        assert sum(prefill) <= chunk_size
    assert len(ran) <= (2 if policy == "alternate" else 1)
    if policy == "alternate":
        assert all(len(forward) == 1 for forward in ran)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups(), st.data())
def test_every_request_ends_with_the_tokens_it_would_have_alone(
    setup: tuple[SchedulerConfig, str, int], data: st.DataObject
) -> None:
    run = build(setup)
    config, policy, chunk_size = setup
    given_requests: dict[str, Request] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(1, 12))):
        request = data.draw(requests(f"r{i}"))
        too_long = len(request.prompt) + request.max_tokens > config.max_model_len
        too_big = len(request.prompt) > config.num_blocks * config.block_size
        with pytest.raises(RequestRefused) if too_long or too_big else nullcontext():
            run.add(request)
            given_requests[request.request_id] = request
        for _ in range(data.draw(st.integers(0, 6))):
            decoding = {s.slot for s in run.scheduler.running if s.decodable}
            plan = run.step()
            if plan is not None:
                check_budget(run.ran[-1], policy, chunk_size, decoding - {a.slot for a in plan.admissions})
        alive = sorted(set(given_requests) - set(run.ended))
        if alive and data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(alive))
            run.abort(victim)
            aborted.add(victim)
    run.drain()
    assert run.scheduler.pool.available == config.num_blocks, "every block is free in the end"
    assert run.scheduler.host.free == config.swap_blocks, "host memory as well"
    assert set(run.ended) == set(given_requests), "no request is lost"
    for name, request in given_requests.items():
        end, tokens, expected = run.ended[name], run.got[name], expected_tokens(request)
        assert tokens == expected[: len(tokens)], "streamed without a gap or a repeat"
        if name in aborted:
            assert end.finish is Finish.ABORT
        elif end.reason == KV_CAPACITY:
            needed = len(request.prompt) + len(tokens) + 1
            assert config.num_blocks * config.block_size < needed + 1, "only what outgrew the whole pool ends by it"
        else:
            assert tokens == expected
            assert run.scores[name] == expected_scores(request)


@settings(max_examples=100, deadline=None)
@given(setups(), st.data())
def test_two_plans_under_way_give_the_same_tokens(setup: tuple[SchedulerConfig, str, int], data: st.DataObject) -> None:
    """Overlap: the next plan is made before the last one's tokens are known."""
    run = build(setup)
    wanted: dict[str, Request] = {}
    under_way: deque[IterationResult] = deque()
    pending_requests = [data.draw(requests(f"r{i}")) for i in range(data.draw(st.integers(1, 8)))]
    for _ in range(5_000):
        if pending_requests:
            request = pending_requests.pop()
            try:
                run.add(request)
                wanted[request.request_id] = request
            except RequestRefused:
                continue
        run.now += 1
        plan = run.scheduler.schedule(run.now)
        run.take(run.scheduler.take_deltas())
        if plan is not None:
            under_way.append(run.worker.execute(plan))
        if under_way and (plan is None or len(under_way) == 2):
            run.take(run.scheduler.commit(under_way.popleft(), run.now))
        run.check()
        if run.scheduler.idle and not pending_requests and not under_way:
            break
    assert set(run.ended) == set(wanted)
    for name, request in wanted.items():
        expected = expected_tokens(request)
        cut = run.ended[name].reason == KV_CAPACITY
        assert run.got[name] == (expected[: len(run.got[name])] if cut else expected)
    assert run.scheduler.pool.available == run.scheduler.config.num_blocks


@settings(max_examples=60, deadline=None)
@given(policies, st.integers(1, 64), st.integers(0, 8))
def test_a_long_prompt_and_its_streams_all_get_on(policy: str, chunk_size: int, streams: int) -> None:
    """None starves: while new short prompts keep coming, the long prompt and the streams end within a bound."""
    config = SchedulerConfig(num_blocks=400, block_size=4, max_model_len=800, vocab_size=VOCAB, max_running=16)
    run = build((config, policy, chunk_size))
    names = [f"s{i}" for i in range(streams)]
    for name in names:
        run.add(Request(name, (1, 2, 3), 20))
    run.add(Request("long", tuple(i % VOCAB for i in range(600)), 5))
    for i in range(6_000):
        if i % 3 == 0 and run.scheduler.stats()["waiting"] < 20:
            run.add(Request(f"n{i}", tuple(range(8)), 2))
        run.step()
        if {"long", *names} <= set(run.ended):
            return
    raise AssertionError(f"not done: { ({'long', *names} - set(run.ended)) }")


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts and lost workers in any order, with a pool too small for them all."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.wanted: dict[str, Request] = {}
        self.gone: set[str] = set()
        config = SchedulerConfig(
            num_blocks=10, block_size=4, max_model_len=64, vocab_size=VOCAB, max_running=4, swap_blocks=7
        )
        self.run = build((config, "chunked", 7))

    @rule(prompt=st.integers(1, 39), max_tokens=st.integers(1, 20), policy=policies)
    def arrive(self, prompt: int, max_tokens: int, policy: str) -> None:
        request = Request(f"r{self.count}", tuple((self.count + i) % VOCAB for i in range(prompt)), max_tokens)
        self.count += 1
        self.run.scheduler.policy = policy_of(policy, 7)
        self.run.add(request)
        self.wanted[request.request_id] = request

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        self.run.abort(name)
        self.gone.add(name)

    @rule()
    def workers_are_replaced(self) -> None:
        self.run.scheduler.requeue_all()
        self.run.take(self.run.scheduler.take_deltas())
        self.run.worker.replace()

    def alive(self) -> list[str]:
        return sorted(set(self.wanted) - set(self.run.ended))

    @invariant()
    def conserved(self) -> None:
        self.run.check()

    def teardown(self) -> None:
        self.run.drain()
        assert self.run.scheduler.pool.available == 10
        assert set(self.run.ended) == set(self.wanted)
        for name, request in self.wanted.items():
            tokens = self.run.got[name]
            if name in self.gone or self.run.ended[name].reason == KV_CAPACITY:
                assert tokens == expected_tokens(request)[: len(tokens)]
            else:
                assert tokens == expected_tokens(request)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
