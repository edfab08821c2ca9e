"""Streams that go on in step fare as if each of them were looked after by itself."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lockstep import Lockstep
from scheduler.plan import NO_TOKEN, IterationPlan, IterationResult
from scheduler.policies import POLICIES
from scheduler.request import Delta, Finish, Request, TokenLogprob
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.test_properties import policy_of

durations = st.floats(0.001, 2.0)


@given(st.lists(durations, max_size=30), st.data())
def test_the_longest_gap_since_any_step_is_known(gaps: list[float], data: st.DataObject) -> None:
    steps, now = Lockstep(), 0.0
    moments = [now := now + gap for gap in gaps]
    for number, moment in enumerate(moments, 1):
        steps.tokens_came(number, moment)
    seen = [after - before for before, after in pairwise([0.0, *moments])]
    since = data.draw(st.integers(0, len(gaps)))
    assert steps.longest_gap_s(since) == max(seen[since:], default=0.0)


class Mirror:
    """A scheduler with up to two plans under way, and what came of each request, token by token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.under_way: deque[IterationPlan] = deque()
        self.now = 0.0
        self.times: dict[str, list[float]] = {}
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, Delta] = {}

    def schedule(self) -> None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.under_way.append(plan)
        self.take(self.scheduler.take_deltas())
        self.scheduler.check()

    def commit(self, token: int, odd: int | None, odd_token: int, scored: bool) -> None:
        """The answer to the oldest plan: everywhere one token, but for one place."""
        plan = self.under_way.popleft()
        sampled = len(self.scheduler.under_way(plan.iteration).sampling)
        tokens = [token] * sampled
        if odd is not None and sampled:
            tokens[odd % sampled] = odd_token
        logprobs = tuple((place, TokenLogprob(-float(place))) for place in range(0, sampled, 2)) if scored else ()
        sampling = self.scheduler.under_way(plan.iteration).sampling
        alive = {of.request_id: place for place, of in enumerate(sampling) if of.request_id not in self.ended}
        deltas = self.scheduler.commit(IterationResult(plan.iteration, tuple(tokens), logprobs), self.now)
        for delta in deltas:
            if delta.tokens:
                place = alive[delta.request_id]
                assert delta.tokens == (tokens[place],), "everybody has what was sampled for it"
                assert delta.logprobs == ((TokenLogprob(-float(place)),) if scored and place % 2 == 0 else ())
        timings = {of.request_id: of for of in self.scheduler.take_timings()}
        assert timings.keys() == {delta.request_id for delta in deltas if delta.tokens}
        for name, timing in timings.items():
            before = self.times.get(name)
            assert timing.gap_s == (self.now - before[-1] if before else None)
        self.take(deltas)
        self.scheduler.check()

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended
            self.told.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.tokens:
                self.times.setdefault(delta.request_id, []).append(self.now)
            if delta.finish is not None:
                self.ended[delta.request_id] = delta
        for served in self.scheduler.take_served():
            times = self.times[served.request_id]
            gaps = [after - before for before, after in pairwise(times)]
            assert served.outcome.largest_gap_s == (max(gaps) if gaps else None)

    def check(self) -> None:
        """Of all that run, by itself or in step."""
        under_way = [self.scheduler.under_way(plan.iteration).sampling for plan in self.under_way]
        for sequence in self.scheduler.running:
            name = sequence.request_id
            assert sequence.tokens[len(sequence.request.prompt) :] == self.told.get(name, [])
            assert sequence.last_token_at == (self.times[name][-1] if name in self.times else None)
            if sequence.preemptions == 0:
                assert sequence.pending == sum(sequence in sampling for sampling in under_way)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 2),
    st.sampled_from([8, 20, 400]),
    st.integers(1, 20),
    st.data(),
)
def test_each_stream_is_told_and_timed_as_if_it_were_alone(
    policy: str, overlap: int, blocks: int, chunk: int, data: st.DataObject
) -> None:
    config = SchedulerConfig(num_blocks=blocks, block_size=4, max_model_len=60, vocab_size=9, max_running=5)
    run = Mirror(Scheduler(config, policy_of(policy, chunk)))
    for number in range(data.draw(st.integers(1, 8))):
        prompt = tuple(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=20)))
        stops = data.draw(st.sampled_from([(), (7,), (7, 8)]))
        run.scheduler.add(Request(f"r{number}", prompt, data.draw(st.integers(1, 12)), stop_token_ids=stops), run.now)
        for _ in range(data.draw(st.integers(0, 8))):
            while len(run.under_way) < overlap and (before := len(run.under_way)) >= 0:
                run.schedule()
                if len(run.under_way) == before:
                    break
            run.check()
            run.now += data.draw(durations)
            if run.under_way:
                odd = data.draw(st.sampled_from([None, None, 0, 1, 3]))
                run.commit(1, odd, data.draw(st.sampled_from([7, NO_TOKEN, 2])), data.draw(st.booleans()))
            run.check()
        if data.draw(st.integers(0, 5)) == 0:
            run.scheduler.abort(f"r{data.draw(st.integers(0, number))}", Finish.ABORT)
            run.take(run.scheduler.take_deltas())
        if data.draw(st.integers(0, 9)) == 0:  # the workers are lost, and what was under way with them
            run.under_way.clear()
            run.scheduler.requeue_all()
            run.take(run.scheduler.take_deltas())
    for _ in range(2000):
        if run.scheduler.idle:
            break
        if not run.under_way:
            run.schedule()
        run.now += 0.5
        if run.under_way:
            run.commit(1, None, 1, False)
    assert run.scheduler.idle, "everybody ends"
