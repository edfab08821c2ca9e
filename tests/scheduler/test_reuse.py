"""Prefix reuse under everything at once: prompts of a tiny alphabet, tenants, aborts, preemptions, new workers, two
plans under way. The strict worker sees to it that a block holds what its reader believes."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.plan import NO_TOKEN, IterationResult
from scheduler.policies import POLICIES
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import KV_CAPACITY, Scheduler, SchedulerConfig
from tests.scheduler.test_properties import policy_of
from tests.scheduler.world import VOCAB, Run, expected_tokens

BLOCKS = 12
SALTS = ("", "a", "b")


class World:
    """A run whose plans may be two under way, and what every request should come to."""

    def __init__(self, blocks: int, block_size: int, max_running: int = 5, swap_blocks: int = 0) -> None:
        config = SchedulerConfig(
            num_blocks=blocks,
            block_size=block_size,
            max_model_len=400,
            vocab_size=VOCAB,
            max_running=max_running,
            max_queued_requests=10_000,
            swap_blocks=swap_blocks,
        )
        self.run = Run.of(Scheduler(config, policy_of("chunked", 7), b"key"))
        self.wanted: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.under_way: deque[IterationResult] = deque()

    @property
    def alive(self) -> list[str]:
        return [name for name in self.wanted if name not in self.run.ended]

    def arrive(self, prompt: tuple[int, ...], max_tokens: int, salt: str) -> None:
        request = Request(f"r{len(self.wanted)}", prompt, max_tokens, SamplingParams(), cache_salt=salt)
        self.run.add(request)
        self.wanted[request.request_id] = request

    def abort(self, name: str) -> None:
        self.run.abort(name)
        self.aborted.add(name)

    def step(self, overlap: int, fails: bool = False) -> None:
        self.run.now += 1
        plan = self.run.scheduler.schedule(self.run.now)
        self.run.take(self.run.scheduler.take_deltas())
        self.run.check()
        if plan is not None:
            result = self.run.worker.execute(plan)
            if fails and result.tokens:
                result = IterationResult(result.iteration, (NO_TOKEN, *result.tokens[1:]), errors=((0, "broken"),))
            self.under_way.append(result)
        while self.under_way and (plan is None or len(self.under_way) >= overlap):
            self.run.take(self.run.scheduler.commit(self.under_way.popleft(), self.run.now))
            self.run.check()

    def replace_workers(self) -> None:
        self.run.scheduler.requeue_all()
        self.run.take(self.run.scheduler.take_deltas())
        self.run.worker.replace()
        self.under_way.clear()

    def finish(self) -> None:
        steps = 0
        while not self.run.scheduler.idle or self.under_way:
            self.step(1)
            steps += 1
            assert steps < 20_000, "somebody waits for ever"
        pool = self.run.scheduler.pool
        assert pool.free + pool.cached == pool.total, "every block is free or cached in the end"
        assert self.run.scheduler.host.free == self.run.scheduler.host.total, "and of the host's"
        assert set(self.run.ended) == set(self.wanted)
        for name, request in self.wanted.items():
            end, tokens, expected = self.run.ended[name], self.run.got.get(name, []), expected_tokens(request)
            cut = name in self.aborted or end.reason == KV_CAPACITY or end.finish is Finish.ERROR
            assert tokens == (expected[: len(tokens)] if cut else expected)


class ReuseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(BLOCKS, 2)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        count=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(SALTS),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def arrive(self, prompt: list[int], count: int, max_tokens: int, salt: str, policy: str) -> None:
        self.world.run.scheduler.policy = policy_of(policy, 5)
        for _ in range(count):
            self.world.arrive(tuple(prompt), max_tokens, salt)

    @precondition(lambda self: self.world.run.ended)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn of a conversation: what was generated, and more."""
        name = data.draw(st.sampled_from(sorted(self.world.run.ended)))
        request = self.world.wanted[name]
        prompt = (*request.prompt, *self.world.run.got.get(name, []), *more)
        if len(prompt) <= 2 * BLOCKS:
            self.world.arrive(prompt, 4, request.cache_salt)

    @rule(steps=st.integers(1, 6), overlap=st.integers(1, 2), fails=st.integers(0, 9))
    def step(self, steps: int, overlap: int, fails: int) -> None:
        for _ in range(steps):
            self.world.step(overlap, fails == 9)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(self.world.alive)))

    @rule()
    def workers_are_replaced(self) -> None:
        self.world.replace_workers()

    @invariant()
    def conserved(self) -> None:
        self.world.run.check()

    def teardown(self) -> None:
        self.world.finish()


TestReuse = ReuseMachine.TestCase
TestReuse.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_a_soak_of_ten_thousand_requests() -> None:
    """Random prompts, many with beginnings in common, a pool too small for them, aborts and lost workers."""
    rnd = random.Random(4)
    world = World(blocks=60, block_size=4, max_running=8)
    systems = [tuple(rnd.randrange(VOCAB) for _ in range(rnd.randrange(1, 60))) for _ in range(12)]
    while len(world.wanted) < 10_000 or world.alive:
        for _ in range(rnd.randrange(4)):
            if len(world.wanted) < 10_000 and len(world.alive) < 30:
                own = tuple(rnd.randrange(VOCAB) for _ in range(rnd.randrange(1, 30)))
                world.arrive((*rnd.choice(systems), *own), rnd.randrange(1, 24), rnd.choice(SALTS))
        world.step(rnd.randrange(1, 3), fails=rnd.random() < 0.01)
        if world.alive and rnd.random() < 0.05:
            world.abort(rnd.choice(world.alive))
        if rnd.random() < 0.002:
            world.replace_workers()
    world.finish()
    stats = world.run.scheduler.stats()
    assert stats["prefix_tokens_hit"] > 0.05 * stats["prefix_tokens_queried"]
    assert min(stats["evictions"], *stats["preemptions_by_cause"].values()) > 0
