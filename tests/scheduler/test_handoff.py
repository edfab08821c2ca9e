"""Prefill here, decode there: whatever is aborted, lost, late or without room, each token comes once, no request is
lost, and every block is freed once on both sides."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.exchange import Role
from scheduler.handoff import Stage
from scheduler.orders import Close, Open, Send
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import KV_CAPACITY, SchedulerConfig
from tests.scheduler.separated import World
from tests.scheduler.world import VOCAB, expected_tokens

ONE_EACH: list[Role] = ["prefill", "decode"]


def config(num_blocks: int = 40, **options: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=120,
        vocab_size=VOCAB,
        max_running=options.get("slots", 6),
        swap_blocks=options.get("swap", 0),
    )


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + salt) % VOCAB for i in range(length))


def request(name: str, length: int = 21, max_tokens: int = 9, salt: int = 0) -> Request:
    return Request(name, prompt(length, salt), max_tokens, SamplingParams())


def check_ends(world: World) -> None:
    assert set(world.ended) == set(world.requests), "no request is lost"
    for name, asked in world.requests.items():
        end, tokens, expected = world.ended[name], world.got[name], expected_tokens(asked)
        assert tokens == expected[: len(tokens)], "streamed without a gap or a repeat"
        if end.finish is Finish.LENGTH and end.reason != KV_CAPACITY:
            assert tokens == expected


def test_chunks_move_while_the_prompt_is_computed() -> None:
    world = World(config(), ONE_EACH, chunk_size=8)
    world.add(request("r"), 0)
    assert world.handoffs.stage("r") is Stage.QUEUED
    early = 0
    while world.handoffs.stage("r") is not Stage.DECODING:
        early += any(isinstance(order, Send) for order in world.orders)
        world.round()
    world.drain()
    check_ends(world)
    (moved,) = world.moved
    assert (moved.tokens, moved.blocks_sent, moved.blocks_shared) == (21, 6, 0)
    assert 0 < moved.early_bytes < moved.bytes == 60
    assert world.all_free


def test_what_the_decode_group_has_is_not_sent_again() -> None:
    world = World(config(), ONE_EACH, chunk_size=8)
    world.add(request("a"), 0)
    world.drain()
    world.add(request("b"), 0)
    world.drain()
    assert [m.blocks_shared for m in world.moved] == [0, 5]
    assert [m.blocks_sent for m in world.moved] == [6, 1]
    check_ends(world)


def test_without_room_the_prefill_group_holds_and_stops_taking_prompts() -> None:
    world = World(config(num_blocks=24), ONE_EACH, chunk_size=32)
    for number in range(8):
        world.add(request(f"r{number}", length=30, max_tokens=12, salt=number), 0)
    most = 0
    for _ in range(40):
        if not world.schedule(0):
            break
        world.commit(0)
        while world.orders:
            world.carry_out(0)
        while world.parcels:
            world.deliver(0)
        most = max(most, len(world.sides[0].scheduler.exchange.held))
    prefill = world.sides[0].scheduler
    assert prefill.waiting, "not all of them were begun while nothing decodes"
    assert 0 < most < 5
    world.drain()
    check_ends(world)
    assert all(len(tokens) == 12 for tokens in world.got.values())


@pytest.mark.parametrize("stage", list(Stage))
def test_an_abort_frees_both_sides_at_once(stage: Stage) -> None:
    world = World(config(num_blocks=30), ONE_EACH, chunk_size=8)
    world.add(request("r"), 0)
    for _ in range(200):
        if world.handoffs.stage("r") is stage and (stage is not Stage.MOVING or world.parcels):
            break
        if world.orders:
            world.carry_out(0)
        elif stage is not Stage.MOVING or world.handoffs.stage("r") is not Stage.MOVING:
            if world.parcels:
                world.deliver(0)
            elif not world.schedule(0):
                world.schedule(1)
            for group in (0, 1):
                world.commit(group)
    assert world.handoffs.stage("r") is stage
    world.abort("r")
    assert world.ended["r"].finish is Finish.ABORT
    while world.orders:
        assert isinstance(world.orders[0], Close | Open | Send)
        world.carry_out(0)
    assert world.all_free, "what the workers closed is free, though a parcel is still on its way"
    while world.parcels:
        world.deliver(0)
    assert world.sent_blocks <= 6


def test_a_kv_that_never_arrives_ends_its_request_with_the_reason() -> None:
    world = World(config(), ONE_EACH, chunk_size=8)
    world.add(request("r"), 0)
    for _ in range(2000):
        if "r" in world.ended:
            break
        world.schedule(0)
        world.commit(0)
        while world.orders:
            world.carry_out(0)
        while world.parcels:
            world.drop(0)
        world.now += 1.0
        world.settle()
    assert world.ended["r"].finish is Finish.ERROR
    assert "connection reset" in (world.ended["r"].reason or "")
    world.drain()
    assert world.all_free


def test_a_prompt_that_fits_no_decode_group_ends() -> None:
    world = World(config(num_blocks=8), ONE_EACH, chunk_size=64)
    world.add(request("r", length=32, max_tokens=4), 0)
    world.drain()
    assert (world.ended["r"].finish, world.ended["r"].reason) == (Finish.LENGTH, KV_CAPACITY)
    assert world.all_free


@pytest.mark.parametrize("ends", ["aborted", "preempted"])
def test_nothing_arrives_in_blocks_that_a_plan_under_way_still_uses(ends: str) -> None:
    """The plan that is under way when a sequence leaves writes a token of it, or copies it out."""
    world = World(config(num_blocks=9, swap=9), ONE_EACH, chunk_size=64, overlap=2)
    world.add(request("a", max_tokens=15), 0)
    while world.handoffs.stage("a") is not Stage.DECODING:
        world.round()
    world.add(request("b", salt=1), 0)
    for _ in range(3):
        world.schedule(0)
        world.commit(0)
    assert world.handoffs.stage("b") is Stage.MOVING
    assert not world.orders, "there is no room for it"
    assert world.schedule(1)
    if ends == "aborted":
        world.abort("a")
    else:
        decode = world.sides[1].scheduler
        decode._preempt(decode.running[0], "kv_blocks")
        world.settle()
    assert not world.orders, "nothing comes before that plan has been carried out"
    world.commit(1)
    world.drain()
    check_ends(world)
    assert len(world.got["b"]) == 9
    assert world.all_free


def test_what_gives_way_on_a_decode_group_is_copied_out_and_goes_on_there() -> None:
    world = World(config(num_blocks=11, swap=20), ONE_EACH, chunk_size=64)
    for number in range(2):
        world.add(request(f"r{number}", length=14, max_tokens=16, salt=number), 0)
    world.drain()
    check_ends(world)
    assert all(len(tokens) == 16 for tokens in world.got.values())
    decode = world.sides[1].scheduler.stats()
    assert decode["preemptions"] > 0
    assert 0 < decode["swapped_in"] <= decode["swapped_out"], "but for what the prefix cache still has"
    assert len(world.moved) == 2, "neither was computed again elsewhere"
    assert world.sides[1].scheduler.host.free == 20
    assert world.all_free


def test_what_is_in_host_memory_of_a_lost_decode_group_is_computed_again_elsewhere() -> None:
    world = World(config(num_blocks=11, swap=20), ONE_EACH, chunk_size=64)
    for number in range(2):
        world.add(request(f"r{number}", length=14, max_tokens=16, salt=number), 0)
    while not world.sides[1].scheduler.waiting:
        assert world.round()
    world.lose(1, told_first=True)
    assert not world.sides[1].scheduler.waiting
    world.drain()
    check_ends(world)
    assert all(len(tokens) == 16 for tokens in world.got.values())
    assert world.all_free


class Separated(RuleBasedStateMachine):
    @initialize(
        prefills=st.integers(1, 2),
        decodes=st.integers(1, 2),
        blocks=st.integers(6, 30),
        slots=st.integers(1, 5),
        chunk_size=st.integers(1, 20),
        overlap=st.integers(1, 2),
        swap=st.sampled_from([0, 0, 5, 30]),
    )
    def start(
        self, prefills: int, decodes: int, blocks: int, slots: int, chunk_size: int, overlap: int, swap: int
    ) -> None:
        roles: list[Role] = ["prefill"] * prefills + ["decode"] * decodes  # type: ignore[assignment]
        self.prefills = prefills
        self.world = World(config(blocks, slots=slots, swap=swap), roles, chunk_size, overlap)

    @rule(length=st.integers(1, 22), max_tokens=st.integers(1, 12), salt=st.integers(0, 1), group=st.integers(0, 1))
    def arrive(self, length: int, max_tokens: int, salt: int, group: int) -> None:
        if len(self.world.requests) < 10:
            self.world.add(request(f"r{len(self.world.requests)}", length, max_tokens, salt), group % self.prefills)

    @rule(group=st.integers(0, 3))
    def plan(self, group: int) -> None:
        self.world.schedule(group % len(self.world.sides))

    @rule(group=st.integers(0, 3))
    def iterate(self, group: int) -> None:
        self.world.schedule(group % len(self.world.sides))
        self.world.commit(group % len(self.world.sides))

    @precondition(lambda self: self.world.orders)
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        orders = self.world.orders
        first = {order.group: index for index, order in reversed(list(enumerate(orders)))}
        self.world.carry_out(data.draw(st.sampled_from(sorted(first.values()))))

    @precondition(lambda self: self.world.parcels)
    @rule(data=st.data(), arrives=st.sampled_from([True, True, True, False]))
    def deliver(self, data: st.DataObject, arrives: bool) -> None:
        index = data.draw(st.integers(0, len(self.world.parcels) - 1))
        if arrives:
            self.world.deliver(index)
        else:
            self.world.drop(index)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule(group=st.integers(0, 3), told_first=st.booleans())
    def lose(self, group: int, told_first: bool) -> None:
        group %= len(self.world.sides)
        if group in self.world.handoffs.standing:
            self.world.lose(group, told_first)

    @rule(group=st.integers(0, 3))
    def rebuild(self, group: int) -> None:
        self.world.rebuild(group % len(self.world.sides))

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            check_ends(self.world)
            assert self.world.all_free, "every block is free in the end"
            assert all(side.scheduler.host.free == side.scheduler.host.total for side in self.world.sides)


Separated.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSeparated = Separated.TestCase
