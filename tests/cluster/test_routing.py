"""Which group takes a request: the least predicted TTFT, with what each group holds of the prompt already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.assembly import Common
from cluster.routing import choose, choose_again, takers
from scheduler.census import Census
from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.exchange import Role
from scheduler.gate import Gate
from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.solver import Solver
from tests.scheduler.world import VOCAB, Run

CONFIG = SchedulerConfig(num_blocks=400, block_size=4, max_model_len=1000, vocab_size=VOCAB, max_running=8)
COST = OnlineCostModel(Coefficients(0.002, 0.04, 0.0025, 1e-6, 1e-7, 1e-4, 2.0))


def group(common: Common, *, forecasts: bool = True, role: Role = "both") -> Any:
    policy = make_policy("chunked", chunk_size=32)
    directory, key = common.directory, common.prefix_key
    scheduler = Scheduler(CONFIG, policy, key, role=role, orders=common.orders, directory=directory)
    if forecasts:
        scheduler.intake.forecaster = Gate(Solver(COST), "best-effort")
    return SimpleNamespace(scheduler=scheduler, failure=None, lost=None)


def groups(count: int, **options: Any) -> list[Any]:
    common = Common()
    return [group(common, **options) for _ in range(count)]


def request(name: str, length: int, salt: int = 0, max_tokens: int = 4) -> Request:
    return Request(name, tuple((7 * i + salt) % VOCAB for i in range(length)), max_tokens)


def serve(loop: Any, asked: Request) -> None:
    loop.scheduler.add(asked, 0.0)
    Run.of(loop.scheduler).drain()


def test_the_shorter_queue_of_prompts_is_taken_whether_times_are_known_or_not() -> None:
    for forecasts in (True, False):
        busy, idle = groups(2, forecasts=forecasts)
        busy.scheduler.add(request("long", 600), 0.0)
        assert choose([busy, idle], request("r", 20, salt=5), 0.0) is idle
        assert choose([idle, busy], request("r", 20, salt=5), 0.0) is idle
        idle.scheduler.add(request("longer", 900, salt=3), 0.0)
        assert choose([busy, idle], request("r", 20, salt=5), 0.0) is busy


def test_equal_groups_take_turns() -> None:
    loops = groups(3)
    taken = []
    for number in range(6):
        loop = choose(loops, request(f"r{number}", 40, salt=number), 0.0)
        loop.scheduler.add(request(f"r{number}", 40, salt=number), 0.0)
        taken.append(loops.index(loop))
    assert sorted(taken) == [0, 0, 1, 1, 2, 2]


def test_a_prompt_goes_where_its_beginning_is_until_the_wait_there_is_longer() -> None:
    first, second = groups(2)
    serve(second, request("before", 400))
    assert choose([first, second], request("r", 410), 0.0) is second
    second.scheduler.add(request("other", 300, salt=1), 0.0)
    assert choose([first, second], request("r", 410), 0.0) is second, "computing 410 tokens takes longer than 310"
    second.scheduler.add(request("another", 900, salt=2), 0.0)
    assert choose([first, second], request("r", 410), 0.0) is first


def test_who_takes_a_prompt_goes_by_what_itself_holds_of_it() -> None:
    """And not by what another holds that was asked after it."""
    first, second = groups(2)
    for loop in (first, second):
        loop.scheduler.intake.gate = loop.scheduler.intake.forecaster
    serve(first, request("before", 400))
    asked = request("r", 410)
    assert choose([first, second], asked, 0.0) is first
    first.scheduler.add(asked, 0.0)
    assert first.scheduler.sequence("r").reusable == 400


def test_of_many_groups_the_shortest_queues_and_those_that_hold_the_prompt_are_asked() -> None:
    loops = groups(40)
    for number, loop in enumerate(loops):
        for queued in range(2 + (number != 31)):
            loop.scheduler.add(request(f"q{queued}", 30, salt=number), 0.0)
    assert choose(loops, request("r", 20, salt=77), 0.0) is loops[31]
    loops = groups(40)
    serve(loops[17], request("before", 800))
    loops[17].scheduler.add(request("q", 30, salt=5), 0.0)
    assert choose(loops, request("r", 810), 0.0) is loops[17]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=60), st.integers(1, 12))
def test_a_census_puts_first_what_sorting_does(places: int, changes: list[tuple[int, bool]], count: int) -> None:
    census, numbers = Census(), [0] * places
    assert [census.new_place() for _ in range(places)] == list(range(places))
    for place, more in changes:
        if place < places and (more or numbers[place]):
            before = numbers[place]
            numbers[place] += 1 if more else -1
            census.changed(place, before, numbers[place])
    for first in (places, max(1, places // 2)):
        assert census.emptiest(count, first) == sorted(range(first), key=numbers.__getitem__)[:count]


def test_of_many_that_hold_the_beginning_those_that_hold_the_most_are_asked() -> None:
    loops = groups(30)
    for number, loop in enumerate(loops):
        serve(loop, request("before", 400 if number in (8, 21) else 40))
    loops[8].scheduler.add(request("q", 900, salt=5), 0.0)
    directory = loops[0].scheduler.pool.directory
    assert choose(loops, request("r", 410), 0.0) is loops[21]
    for loop in loops:
        loop.scheduler.pool.forget_all()
    assert len(directory) == 0, "it knows what the pools know"


def test_a_newcomer_is_made_once_until_a_group_has_taken_it() -> None:
    first, second = (loop.scheduler for loop in groups(2))
    asked = request("r", 50)
    newcomer = first.intake.newcomer(asked, 0.0)
    for scheduler in (first, second):
        scheduler.intake.expected(newcomer, 0.0)
    assert second.intake.newcomer(asked, 0.0) is newcomer
    assert second.intake.newcomer(asked, 1.0) is not newcomer, "it would have come later"
    first.add(asked, 0.0)
    assert first.sequence("r") is newcomer
    again = second.intake.newcomer(asked, 0.0)
    assert again is not newcomer
    assert again.tokens == newcomer.tokens


def test_the_blocks_of_a_newcomer_are_looked_up_once_though_clocks_go_on() -> None:
    loops = groups(2)
    asked = request("r", 200)
    taking = choose(loops, asked, 0.0)
    known = taking.scheduler.intake.newcomer(asked, 0.0).digests
    later = taking.scheduler.intake.newcomer(asked, 0.5)
    assert later.arrival == 0.5
    assert later.digests == known != []


@pytest.mark.parametrize("token", [-1, VOCAB, 2**32, 2**70])
def test_a_token_that_there_is_not_is_refused_before_it_is_looked_for(token: int) -> None:
    with pytest.raises(RequestRefused, match=f"token id {token} is outside the vocabulary"):
        choose(groups(2), Request("r", (1, token, 2, 3, 4), 4), 0.0)


def test_a_sequence_that_starts_over_is_placed_alike() -> None:
    busy, idle = groups(2, role="prefill")
    busy.scheduler.add(request("long", 600), 0.0)
    again = busy.scheduler.intake.newcomer(request("r", 50, salt=9), 0.0)
    assert choose_again(again, {4: busy.scheduler, 7: idle.scheduler}, 0.0) == 7
    assert choose_again(again, {4: busy.scheduler}, 0.0) == 4


def test_who_may_be_given_requests() -> None:
    common = Common()
    prefill, other, decode = (group(common, role=role) for role in ("prefill", "prefill", "decode"))
    assert takers([prefill, other, decode]) == [prefill, other]
    prefill.lost = "rank 0 died"
    assert takers([prefill, other, decode]) == [other]
    other.lost = "rank 0 died"
    assert takers([prefill, other, decode]) == [prefill, other], "they wait for new workers"
    prefill.failure = "given up"
    assert takers([prefill, other, decode]) == [other]
    decode.failure = "given up"
    assert takers([prefill, other, decode]) == [], "nobody would go on"
