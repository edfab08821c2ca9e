"""Those that wait by their deadlines: who is given up, who is let in, and that in the end everybody is served."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.deadlines import Due, of, relegated
from scheduler.entrance import PATIENCE
from scheduler.gate import Gate
from scheduler.line import FairLine
from scheduler.policies import make_policy
from scheduler.request import Request, Sequence
from scheduler.scheduler import Scheduler
from scheduler.slo import Promise
from scheduler.solver import Solver
from tests.scheduler.virtual import CONFIG, COST, VirtualRun, prompt
from tests.scheduler.world import Run, expected_tokens

WAIT, HURRY = Promise(3000, 5.0), Promise(8, 5.0)


def due(order: int, seconds: float, due: float) -> Due:
    tokens = tuple(range(round(seconds)))
    request = Request(f"r{order}", tokens, 1)
    sequence = Sequence(request=request, arrival=0.0, order=order, tokens=list(tokens), promise=Promise(due, 1))
    sequence.due = due
    return of(sequence)


def work(sequence: Sequence) -> float:
    return float(len(sequence.tokens))


def fits(prompts: list[Due]) -> bool:
    ends = 0.0
    for at, _, sequence in sorted(prompts):
        ends += work(sequence)
        if ends > at:
            return False
    return True


jobs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=7)


@settings(deadline=None)
@given(jobs)
def test_who_is_not_given_up_is_in_time(sizes: list[tuple[int, int]]) -> None:
    prompts = sorted(due(k, size, at) for k, (size, at) in enumerate(sizes))
    late = relegated(prompts, work, 0.0)
    assert fits([each for each in prompts if each[1] not in late])
    assert bool(late) is not fits(prompts), "nobody is given up in vain"


@settings(deadline=None)
@given(jobs)
def test_of_promises_of_one_time_the_fewest_are_given_up(sizes: list[tuple[int, int]]) -> None:
    prompts = sorted(due(k, size, 16 + at / 2) for k, (size, at) in enumerate(sizes))
    late = relegated(prompts, work, 0.0)
    subsets = chain.from_iterable(combinations(prompts, size) for size in range(len(prompts) + 1))
    most = max(len(subset) for subset in subsets if fits(list(subset)))
    assert len(prompts) - len(late) == most


def test_nobody_loses_a_short_promise_for_others_that_may_take_their_time() -> None:
    prompts = [due(0, 8, 10), due(1, 5, 100), due(2, 7, 100), due(3, 87, 101)]
    assert relegated(prompts, work, 0.0) == {3}
    assert relegated([due(0, 8, 10), due(1, 3, 10), due(2, 7, 100)], work, 0.0) == {0}


def slo(**changes: int) -> VirtualRun:
    policy = VirtualRun.with_policy().scheduler.policy
    run = VirtualRun.of(Scheduler(replace(CONFIG, **changes), policy))
    assert isinstance(run, VirtualRun)
    return run


def entered(run: Run) -> list[str]:
    """Whoever is let in, in that order, until all have ended."""
    with patch.object(FairLine, "enter", autospec=True, side_effect=FairLine.enter) as seen:
        run.drain()
    return [call.args[1].request_id for call in seen.call_args_list]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(1, 6))
def test_with_one_promise_that_all_can_keep_it_is_the_order_of_arrival(sizes: list[int], slots: int) -> None:
    run = slo(max_running=slots)
    for k, size in enumerate(sizes):
        run.add(Request(f"r{k}", prompt(size), 3, promise=WAIT))
    while not run.scheduler.idle:
        run.step()
    firsts = [run.times[f"r{k}"][0] for k in range(len(sizes))]
    assert firsts == sorted(firsts)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(200, 3000), min_size=8, max_size=30),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 400)), min_size=1, max_size=4),
    st.booleans(),
)
def test_who_is_in_a_hurry_is_in_time_though_what_can_wait_fills_the_server(
    waiting: list[int], hurrying: list[tuple[int, int]], scarce: bool
) -> None:
    """Slots, or blocks, for a few of those that can wait; they make room."""
    run = slo(max_running=4) if not scarce else slo(num_blocks=320)
    for k, size in enumerate(waiting):
        run.add(Request(f"w{k}", prompt(size), 2, promise=WAIT))
    came, arriving = dict[str, float](), sorted(hurrying)
    for step in range(3000):
        while arriving and arriving[0][0] <= step:
            _, size = arriving.pop(0)
            name = f"h{len(came)}"
            came[name] = run.now
            run.add(Request(name, prompt(size), 2, promise=HURRY))
        if run.scheduler.idle and not arriving:
            break
        run.step()
    for name, arrival in came.items():
        assert run.times[name][0] <= arrival + HURRY.ttft_s, name
    assert len(run.ended) == len(waiting) + len(hurrying)


@settings(max_examples=20, deadline=None)
@given(st.integers(50, 300), st.integers(1, 4), st.sampled_from([0.01, 0.1]))
def test_nothing_starves(size: int, slots: int, hopeless: float) -> None:
    """One that can never be in time among a flood, without end, of those that can."""
    run = slo(max_running=slots)
    request, come = Request("hopeless", prompt(size), 2, promise=Promise(hopeless, 5.0)), 0
    run.add(request)
    while "hopeless" not in run.ended:
        while len(run.scheduler.waiting) < 5:
            run.add(Request(f"f{come}", prompt(40), 1, promise=Promise(60, 5.0)))
            come += 1
        run.step()
        assert come < 10 * PATIENCE * size / 40 + 200, "starved"
    assert run.got["hopeless"] == expected_tokens(request)


def test_what_can_wait_holds_nothing() -> None:
    run = slo()
    for k in range(200):
        run.add(Request(f"w{k}", prompt(1000), 2, promise=WAIT))
    run.step()
    assert len(run.scheduler.running) < 12, "of 32 slots"
    run.drain()
    assert len(run.ended) == 200


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.sampled_from(["slo", "chunked", "whole"]))
def test_tenants_take_turns_by_weight(weight: int, policy: str) -> None:
    """Requests of one length and one promise: in any time in which both wait, each has its share to a request."""
    cost = VirtualRun.with_policy().budget.cost
    run = Run.of(Scheduler(replace(CONFIG, max_running=2), make_policy(policy, chunk_size=64, cost=cost)))
    for k in range(40):
        run.add(Request(f"a{k}", prompt(30), 2, promise=WAIT, tenant="a"))
    for k in range(20):
        run.add(Request(f"b{k}", prompt(30), 2, promise=WAIT, tenant="b", weight=float(weight)))
    order = entered(run)
    both = order[: 1 + max(k for k, name in enumerate(order) if name[0] == "b")]
    for end in range(len(both)):
        a, b = (sum(name[0] == who for name in both[:end]) for who in "ab")
        assert abs(a - b / weight) <= 1 + 1 / weight


def test_a_tenant_that_floods_is_given_up_before_one_that_does_not() -> None:
    run = slo(max_running=8)
    for k in range(60):
        run.add(Request(f"a{k}", prompt(400), 2, promise=HURRY, tenant="a"))
    run.add(Request("b", prompt(400), 2, promise=HURRY, tenant="b"))
    run.drain()
    assert run.times["b"][0] <= HURRY.ttft_s
    assert sum(times[0] > HURRY.ttft_s for times in run.times.values()) > 40


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 25), st.integers(1, 600))
def test_the_forecast_knows_that_what_can_wait_makes_room(others: int, size: int) -> None:
    """Refused only where it could not be in time: never for the slots that others hold who can wait."""
    run = slo(max_running=3)
    run.scheduler.intake.gate = Gate(Solver(COST, cap=8192), "reject")
    for k in range(others):
        run.add(Request(f"w{k}", prompt(2000), 2, promise=WAIT))
        run.step()
    came = run.now
    run.add(Request("h", prompt(size), 2, promise=HURRY))
    sequence = run.scheduler.sequence("h")
    assert sequence is not None
    predicted = sequence.predicted_ttft_s
    run.drain()
    taken = run.times["h"][0] - came
    assert taken <= HURRY.ttft_s
    assert predicted == pytest.approx(taken, abs=2.5)


def test_a_request_that_was_put_off_is_in_time_where_others_leave_it_the_room() -> None:
    run = slo(max_running=8)
    run.scheduler.intake.gate = Gate(Solver(COST, cap=8192), "best-effort")
    run.add(Request("long", prompt(2500), 2, promise=HURRY))
    run.add(Request("put off", prompt(900), 2, promise=HURRY))
    delta = run.scheduler.take_deltas()[-1]
    assert delta.grant is not None
    assert delta.grant.best_effort
    run.abort("long")
    run.drain()
    assert run.times["put off"][0] <= HURRY.ttft_s
