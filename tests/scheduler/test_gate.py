"""Promises at admission, in a world of virtual time: what is predicted, refused, relaxed, or served last."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.codec import decode_deltas, encode_deltas
from scheduler.costmodel import OnlineCostModel
from scheduler.errors import RequestRefused
from scheduler.gate import Gate, OnInfeasible
from scheduler.policies.slo import SloBudget, SloPolicy, SloSettings
from scheduler.request import Delta, Request
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler
from scheduler.slo import LONGEST_PROMISE_S, Grant, Promise
from scheduler.solver import Solver
from tests.scheduler.virtual import CONFIG, COST, VirtualRun, prompt, stream
from tests.scheduler.world import Run, expected_tokens


def gated(on_infeasible: OnInfeasible) -> VirtualRun:
    run = VirtualRun.with_policy()
    run.scheduler.intake.gate = Gate(Solver(COST, cap=8192), on_infeasible)
    return run


def with_streams(run: VirtualRun, count: int = 8) -> VirtualRun:
    for index in range(count):
        run.add(stream(f"s{index}", Promise(5, 0.2), tokens=400))
    for _ in range(4):
        run.step()
    return run


def test_what_can_be_kept_is_admitted_as_asked() -> None:
    run = with_streams(gated("reject"))
    run.add(Request("easy", prompt(500), 4, promise=Promise(20, 1)))
    sequence = run.scheduler.waiting[0]
    assert sequence.promise == Promise(20, 1)
    assert sequence.predicted_ttft_s is not None
    assert 0.5 < sequence.predicted_ttft_s < 20
    assert run.scheduler.take_deltas() == []


def test_a_first_token_that_cannot_be_in_time_is_refused_with_the_numbers() -> None:
    run = with_streams(gated("reject"))
    with pytest.raises(RequestRefused) as caught:
        run.add(Request("hard", prompt(4000), 4, promise=Promise(2, 1)))
    refused = caught.value
    assert refused.code == "slo_infeasible"
    assert refused.param == "slo"
    assert "2000 ms are promised" in refused.message
    assert refused.retry_after_s is not None
    assert refused.retry_after_s > 1
    assert run.scheduler.waiting == (), "nothing of it stays behind"
    run.add(Request("hard", prompt(40), 4, promise=Promise(2, 1)))


def test_a_pace_that_no_iteration_has_is_refused() -> None:
    run = with_streams(gated("reject"))
    with pytest.raises(RequestRefused, match="a token every"):
        run.add(Request("fast", prompt(10), 40, promise=Promise(20, 0.01)))


def test_relaxed_to_the_nearest_that_can_be_kept_and_kept() -> None:
    run = with_streams(gated("relax"))
    asked = Promise(2, 1)
    run.add(Request("hard", prompt(4000), 4, promise=asked))
    sequence = run.scheduler.waiting[0]
    (delta,) = run.scheduler.take_deltas()
    assert delta.grant is not None
    assert not delta.grant.best_effort
    assert delta.grant.promise == sequence.promise
    assert sequence.promise.ttft_s > asked.ttft_s
    assert sequence.promise.tpot_s == asked.tpot_s
    arrived = run.now
    while "hard" not in run.times or not run.times["hard"]:
        run.step()
    taken = run.times["hard"][0] - arrived
    assert taken <= sequence.promise.ttft_s <= 1.6 * taken, "kept, and not far from what it took"


def test_best_effort_is_served_last_and_in_the_end() -> None:
    run = with_streams(gated("best-effort"))
    hard = Request("hard", prompt(4000), 4, promise=Promise(2, 1))
    run.add(hard)
    (delta,) = run.scheduler.take_deltas()
    assert delta.grant is not None
    assert delta.grant.best_effort
    assert delta.grant.promise == Promise(LONGEST_PROMISE_S, 1), "its pace is still promised"
    later = [Request(f"later{index}", prompt(400), 4, promise=Promise(8, 1)) for index in range(3)]
    for request in later:
        run.add(request)
    run.drain()
    for request in later:
        assert run.times[request.request_id][0] < run.times["hard"][0]
    assert run.got["hard"] == expected_tokens(hard)
    classes = {served.request_id: served.slo_class for served in run.scheduler.take_served()}
    assert classes["hard"] == "best_effort"
    assert classes["later0"] == "custom"


def test_a_resumed_request_passes_whatever_it_was_promised() -> None:
    run = with_streams(gated("reject"))
    run.add(Request("back", prompt(4000), 4, produced=(1, 2), promise=Promise(0.1, 0.01)))


def test_who_waits_for_a_slot_is_told_so() -> None:
    run = gated("reject")
    with_streams(run, 32)  # all there are
    with pytest.raises(RequestRefused) as caught:
        run.add(Request("no slot", prompt(16), 4, promise=Promise(10, 1)))
    step = COST.predict(run.features[-1])
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 200 * step


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    streams=st.integers(0, 16),
    tpot=st.floats(0.15, 1.0),
)
@settings(max_examples=40, deadline=None)
def test_the_forecast_is_near_what_happens(lengths: list[int], streams: int, tpot: float) -> None:
    """In a world that matches the model, where nobody comes after: never much too low, seldom much too high."""
    run = gated("reject")
    for index in range(streams):
        run.add(stream(f"s{index}", Promise(60, tpot, tpot), tokens=2000))
    while (run.scheduler.running != () and any(s.prefilling for s in run.scheduler.running)) or run.scheduler.waiting:
        run.step()
    for index, length in enumerate(lengths):
        run.add(Request(f"p{index}", prompt(length), 1, promise=Promise(1000, 60)))
    last, arrived = f"p{len(lengths) - 1}", run.now
    predicted = run.scheduler.waiting[-1].predicted_ttft_s
    while not run.times.get(last):
        run.step()
    taken = run.times[last][0] - arrived
    assert predicted is not None
    assert 0.6 * taken - 0.1 <= predicted <= 2.5 * taken + 0.5


def test_grants_survive_the_wire() -> None:
    deltas = (Delta("r", grant=Grant(Promise(1, 2, 3), 4.5, True)), Delta("q", grant=Grant(Promise(1, 2), 0.5)))
    assert decode_deltas(encode_deltas(deltas)) == deltas
    assert deltas[0]._replace(grant=None) == Delta("r")


def test_a_cautious_budget_means_smaller_chunks_and_not_longer_iterations() -> None:
    def predicted(margin: float) -> float:
        run = gated("reject")
        run.scheduler.intake.gate = Gate(Solver(COST, cap=8192), "reject", lambda: lambda seconds: seconds * margin)
        with_streams(run)
        run.add(Request("long", prompt(2000), 4, promise=Promise(1000, 1)))
        forecast = run.scheduler.waiting[0].predicted_ttft_s
        assert forecast is not None
        return forecast

    chunk_alone = predicted(1.0)
    assert chunk_alone < predicted(1.2) < 2 * chunk_alone
    alone = gated("reject")
    alone.scheduler.intake.gate = Gate(Solver(COST, cap=8192), "reject", lambda: lambda seconds: 3.0 * seconds)
    alone.add(Request("alone", prompt(2000), 4, promise=Promise(1000, 1)))
    expected = COST.predict(Features().with_chunk(1000, 2000))
    assert alone.scheduler.waiting[0].predicted_ttft_s == pytest.approx(expected), (
        "no stream, nothing to be cautious of"
    )


def bounded(on_infeasible: OnInfeasible, truth: float = 1.0) -> VirtualRun:
    """Iterations are not planned to take longer than 0.4 s, as on a server."""
    run = VirtualRun.with_policy(SloSettings(longest_s=0.4), truth)
    cost = run.budget.cost
    run.scheduler.intake.gate = Gate(Solver(cost, cap=8192), on_infeasible, longest_s=0.4, relax=cost.relax)
    return run


class Flooded:
    """Newcomers come at random, ten times as many as can be served, and those who are admitted are seen off."""

    def __init__(self, on_infeasible: OnInfeasible, seed: int, truth: float = 1.0) -> None:
        self.run = bounded(on_infeasible, truth)
        self.admitted: dict[str, float] = {}
        self.promises: dict[str, Promise] = {}
        self.refused = 0
        self._random = random.Random(seed)

    def come(self, seconds: float, per_s: float) -> None:
        until, at = self.run.now + seconds, self.run.now
        while self.run.now < until:
            while at <= self.run.now:
                at += self._random.expovariate(per_s)
                self._one(len(self.admitted) + self.refused)
            if self.run.step() is None:
                self.run.now = at

    def _one(self, number: int) -> None:
        length = self._random.choice((20, 200, 1500))
        promise = Promise(self._random.choice((1, 3)) * max(1.0, length / 100), 0.5)
        try:
            self.run.add(Request(f"r{number}", prompt(length), self._random.randint(1, 30), promise=promise))
        except RequestRefused:
            self.refused += 1
        else:
            self.admitted[f"r{number}"] = self.run.now
            self.promises[f"r{number}"] = promise

    def kept(self) -> float:
        self.run.drain()
        in_time = [self.run.times[name][0] - at <= self.promises[name].ttft_s for name, at in self.admitted.items()]
        return sum(in_time) / len(in_time)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_admitted_is_kept_however_much_comes(seed: int) -> None:
    flooded = Flooded("reject", seed)
    flooded.come(120, per_s=10)
    assert flooded.refused > len(flooded.admitted) > 100
    assert flooded.kept() >= 0.95


@pytest.mark.parametrize("seed", range(4))
def test_and_on_a_machine_that_is_slower_than_it_was_once_that_is_known(seed: int) -> None:
    flooded = Flooded("reject", seed, truth=2.0)
    flooded.come(10, per_s=10)
    flooded.admitted.clear()
    flooded.come(200, per_s=10)
    assert flooded.refused > len(flooded.admitted) > 100
    assert flooded.kept() >= 0.93


def test_nobody_is_let_in_at_the_cost_of_a_promise_that_was_given() -> None:
    """A long prompt that is just in time alone, and short ones that are due before it, as many as will come."""
    run, alone = bounded("reject"), bounded("reject")
    long = Request("long", prompt(4000), 2, promise=Promise(600, 1))
    alone.add(long)
    alone.drain()
    promised = 1.5 * alone.times["long"][0]
    run.add(replace(long, promise=Promise(promised, 1)))
    refusals = []
    admitted = 0
    while not run.times.get("long"):
        try:
            run.add(Request(f"s{admitted + len(refusals)}", prompt(100), 2, promise=Promise(5, 1)))
            admitted += 1
        except RequestRefused as error:
            refusals.append(error.message)
        run.step()
    assert run.times["long"][0] <= promised
    assert admitted > 0
    assert any("would be late for it" in said or "are promised" in said for said in refusals)


def test_a_short_prompt_is_computed_at_the_rate_of_what_fills_its_iteration() -> None:
    """Or long ones that are due later, and just in time, would be taken to be late anyway: by the rate of an iteration
    that has nothing but the short one."""
    run = with_streams(gated("reject"), 16)
    intake = run.scheduler.intake
    gate = intake.gate
    assert gate is not None

    def token_s(length: int) -> float:
        newcomer = intake.newcomer(Request("newcomer", prompt(length), 1, promise=Promise(2, 1)), run.now)
        return gate.forecast(newcomer, intake._queue(newcomer), run.now).token_s

    alone, full = token_s(20), token_s(2000)
    assert alone > 1.2 * full
    run.add(Request("long", prompt(2000), 4, promise=Promise(60, 1)))
    assert token_s(20) == pytest.approx(full, rel=0.05)


def test_a_stream_without_end_does_not_keep_alive_what_was_learned_in_a_bad_moment() -> None:
    """Who is refused because of it teaches nothing, and the server is never idle: it would be so for ever."""
    run = bounded("reject")
    run.add(Request("endless", prompt(16), 8000, promise=Promise(60, 0.5)))
    for _ in range(3):
        run.step()
    gate = run.scheduler.intake.gate
    assert gate is not None
    for _ in range(3):
        gate.caution.learn(kept=False, now=run.now)
    refused = []
    for number in range(50):
        try:
            run.add(Request(f"r{number}", prompt(200), 5, promise=Promise(2, 0.5)))
        except RequestRefused:
            refused.append(number)
        until = run.now + 2
        while run.now < until:
            run.step()
    assert refused, "or this shows nothing"
    assert max(refused) < 10, "some seconds, and then no more"
    for number in range(10, 50):
        assert len(run.times[f"r{number}"]) == 5


@pytest.mark.parametrize("promise", [Promise(0.01, 1), Promise(1, 0.001)], ids=["the first token", "the next ones"])
def test_what_cannot_be_kept_by_an_idle_server_either_is_told_so(promise: Promise) -> None:
    with pytest.raises(RequestRefused) as caught:
        gated("reject").add(Request("hopeless", prompt(100), 4, promise=promise))
    assert caught.value.retry_after_s == math.inf
    assert "nobody else" in caught.value.message
    slow = bounded("reject")
    for _ in range(50):
        slow.budget.cost.observe(Features(decodes=8), 3.5 * COST.predict(Features(decodes=8)))
    with_streams(slow)
    with pytest.raises(RequestRefused) as caught:
        slow.add(Request("a bad moment", prompt(100), 4, promise=Promise(0.6, 1)))
    assert "try again later" in caught.value.message
    with pytest.raises(RequestRefused) as caught:
        with_streams(gated("reject"), 32).add(Request("later", prompt(100), 4, promise=Promise(2, 1)))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s < math.inf
    assert "try again later" in caught.value.message


def test_who_is_alone_has_what_an_idle_server_can_promise() -> None:
    """And nobody is told that this is impossible; it is kept then."""
    run, length = gated("reject"), 6000
    alone = COST.predict(Features().with_chunk(length // 2, length))
    with pytest.raises(RequestRefused, match="nobody else"):
        run.add(Request("too much", prompt(length), 4, promise=Promise(0.99 * alone, 1)))
    run.add(Request("enough", prompt(length), 4, promise=Promise(1.2 * alone, 1)))
    while not run.times.get("enough"):
        run.step()
    assert run.times["enough"][0] <= 1.2 * alone
    busy = with_streams(gated("reject"), 32)
    with pytest.raises(RequestRefused, match="try again later"):
        busy.add(Request("enough", prompt(length), 4, promise=Promise(1.2 * alone, 1)))


def test_who_waited_long_for_the_scheduler_is_not_taken_to_be_far_away() -> None:
    """Its answer's way back is not as long as a scheduler was away, or as its client took to send it."""
    waited = Request("waited", prompt(16), 4, age_s=10.0, promise=Promise(14, 1))
    gated("reject").add(waited)
    with pytest.raises(RequestRefused):
        gated("reject").add(replace(waited, promise=Promise(10.5, 1)))


@pytest.mark.parametrize("alike", [True, False])
def test_choices_of_one_prompt_are_not_taken_for_as_many_prompts(alike: bool) -> None:
    """They wait for the first of them, and share what it computes."""
    policy = SloPolicy(SloBudget(OnlineCostModel(COST)))
    run = Run.of(Scheduler(replace(CONFIG, prefix_caching=True), policy))
    run.scheduler.intake.gate = Gate(Solver(COST, cap=8192), "reject")
    promise = Promise(2 * COST.predict(Features().with_chunk(500, 1000)), 1)
    admitted = 0
    for choice in range(6):
        tokens = (*prompt(999), 1) if alike else (choice, *prompt(999))
        with suppress(RequestRefused):
            run.add(Request(f"r{choice}", tokens, 4, promise=promise))
            admitted += 1
    assert admitted == 6 if alike else admitted < 3
    run.drain()
    computed = sum(len(s) for s in run.got.values())
    assert computed == 4 * admitted
