"""Who gives its blocks up when there are none left."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies import make_policy
from scheduler.request import Request
from scheduler.residents import MOST_PREEMPTIONS
from scheduler.scheduler import Scheduler
from scheduler.slo import Promise
from tests.scheduler.test_properties import policies, policy_of
from tests.scheduler.virtual import CONFIG, VirtualRun, prompt, stream
from tests.scheduler.world import Run, expected_tokens

HURRY, EASE = Promise(1, 0.1), Promise(1, 5.0)


def decoding(*requests: Request) -> VirtualRun:
    """All of them have had their first token."""
    run = VirtualRun.with_policy()
    for request in requests:
        run.add(request)
    while any(s.first_token_at is None for s in run.scheduler.running) or run.scheduler.waiting:
        run.step()
    return run


def victim(run: VirtualRun, later: float = 0.0) -> str:
    return run.scheduler.policy.victim(run.scheduler.running, run.now + later).request_id


def test_the_stream_with_most_time_left_waits() -> None:
    run = decoding(stream("a", HURRY), stream("ease", EASE), stream("b", HURRY))
    assert victim(run) == "ease"


def test_what_it_takes_to_come_back_counts() -> None:
    """Equal promises: the one whose context takes longer to be computed again has less time left for it."""
    run = decoding(Request("short", prompt(16), 60, promise=EASE), Request("long", prompt(1500), 60, promise=EASE))
    assert victim(run) == "short"
    assert run.scheduler.running[-1].request_id == "long", "though the other is older"


def test_a_stream_that_is_late_is_not_given_up_for_that() -> None:
    run = decoding(stream("hurry", HURRY), stream("ease", EASE))
    assert victim(run, later=3.0) == "ease"


def test_a_prompt_that_cannot_keep_its_promise_loses_nothing() -> None:
    run = VirtualRun.with_policy()
    run.add(stream("s", EASE))
    for _ in range(3):
        run.step()
    run.add(Request("late", prompt(4000), 5, promise=Promise(0.01, 1)))
    run.add(Request("too", prompt(4000), 5, promise=Promise(0.01, 1)))
    run.add(Request("hopeful", prompt(3000), 5, promise=Promise(60, 1)))
    run.step()
    assert len(run.scheduler.running) == 4
    assert victim(run) == "too", "of those that are late the youngest"


def test_other_policies_give_up_the_youngest() -> None:
    run = decoding(stream("a", HURRY), stream("ease", EASE), stream("b", HURRY))
    for name in ("whole", "alternate", "chunked"):
        run.scheduler.policy = make_policy(name, chunk_size=8)
        assert victim(run) == "b"


def test_under_pressure_promises_decide_who_waits() -> None:
    """A second an iteration, and blocks for two of three: the oldest waits, since it has the time."""
    policy = VirtualRun.with_policy().scheduler.policy
    run = Run.of(Scheduler(replace(CONFIG, num_blocks=10), policy))
    for name, tpot in (("ease", 50.0), ("a", 2.0), ("b", 2.0)):
        run.add(stream(name, Promise(100, tpot)))
    gave_way = set()
    while not run.scheduler.idle:
        run.step()
        gave_way |= {s.request_id for s in run.scheduler.waiting if s.gave_way}
    assert gave_way == {"ease"}
    assert {name: len(tokens) for name, tokens in run.got.items()} == {"ease": 60, "a": 60, "b": 60}


@settings(max_examples=60, deadline=None)
@given(policies, st.integers(45, 60), st.sampled_from([0, 20, 200]), st.data())
def test_no_thrash_where_everybody_wants_far_more_than_there_is(
    policy: str, blocks: int, swap: int, data: st.DataObject
) -> None:
    """Blocks of one token, and streams that each want nearly all of them: they all end, each with its own tokens, and
    none has given way more often than the bound."""
    sizes = replace(CONFIG, num_blocks=blocks, block_size=1, max_running=8, swap_blocks=swap)
    run = Run.of(Scheduler(sizes, policy_of(policy, 16)))
    requests = []
    for i in range(data.draw(st.integers(4, 10))):
        promise = Promise(100, data.draw(st.sampled_from([1.5, 4.0, 60.0])))
        requests.append(Request(f"r{i}", prompt(data.draw(st.integers(1, 5))), 40, promise=promise))
        run.add(requests[-1])
    sequences = run.scheduler.waiting
    run.drain(5000)
    assert all(run.got[request.request_id] == expected_tokens(request) for request in requests)
    assert max(sequence.gave_way for sequence in sequences) <= MOST_PREEMPTIONS
