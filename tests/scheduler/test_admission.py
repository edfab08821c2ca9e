"""What is refused at the door, with the numbers that decide; and that the next request is none the worse for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.blocks import BlockPool
from scheduler.errors import RequestRefused
from scheduler.policies import make_policy
from scheduler.request import Finish, Request
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.world import VOCAB, Run, expected_tokens

CONFIG = SchedulerConfig(
    num_blocks=4, block_size=4, max_model_len=32, vocab_size=VOCAB, max_running=2, max_queued_requests=3
)
GOOD = Request("good", (1, 2, 3), 4)


def fresh(config: SchedulerConfig = CONFIG) -> Run:
    return Run.of(Scheduler(config, make_policy("chunked", chunk_size=5)))


@pytest.mark.parametrize(
    ("bad", "code", "numbers"),
    [
        (replace(GOOD, prompt=()), "invalid_request", ["empty"]),
        (replace(GOOD, max_tokens=-1), "invalid_request", ["at least 0", "-1"]),
        (replace(GOOD, prompt=(1,) * 32, max_tokens=1), "context_length_exceeded", ["33", "32"]),
        (replace(GOOD, prompt=(1,) * 17, max_tokens=1), "kv_capacity_exceeded", ["needs 5", "has 4"]),
        (replace(GOOD, prompt=(1, VOCAB)), "invalid_request", [str(VOCAB)]),
        (replace(GOOD, prompt=(1, -1)), "invalid_request", ["-1"]),
        (replace(GOOD, produced=(1, 2, 3, 4)), "invalid_request", ["4"]),
    ],
)
def test_lengths_and_tokens(bad: Request, code: str, numbers: list[str]) -> None:
    run = fresh()
    with pytest.raises(RequestRefused) as refusal:
        run.add(bad)
    assert refusal.value.code == code
    assert all(number in refusal.value.message for number in numbers), refusal.value.message
    run.add(GOOD)
    run.drain()
    assert run.got["good"] == expected_tokens(GOOD)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 1e9])
def test_sampling_numbers_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    run = fresh()
    with pytest.raises(RequestRefused) as refusal:
        run.add(replace(GOOD, sampling=SamplingParams(**{name: value})))
    assert refusal.value.param == name
    assert run.scheduler.idle


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(logit_bias=((VOCAB, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=((1, math.nan),)), "logit_bias"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(seed=2**64), "seed"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(top_p=0.0), "top_p"),
    ],
)
def test_other_sampling_values(sampling: SamplingParams, param: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        fresh().add(replace(GOOD, sampling=sampling))
    assert refusal.value.param == param


def test_the_queue_is_bounded_and_an_id_is_unique() -> None:
    run = fresh()
    for i in range(3):
        run.add(replace(GOOD, request_id=f"r{i}"))
    with pytest.raises(RequestRefused, match="already") as twice:
        run.add(replace(GOOD, request_id="r1"))
    assert twice.value.code == "duplicate_request"
    with pytest.raises(RequestRefused) as full:
        run.add(replace(GOOD, request_id="r9"))
    assert full.value.code == "queue_full"
    run.drain()
    run.ended.clear()
    run.add(replace(GOOD, request_id="r1"))
    run.drain()
    assert set(run.ended) == {"r1"}, "an id may come again once its request has ended"


def test_one_that_outgrows_the_pool_alone_ends_alone_and_those_behind_it_get_on() -> None:
    run = fresh()
    run.add(Request("big", (1,) * 10, 20))
    run.add(Request("next", (2,) * 6, 3))
    run.drain()
    assert (run.ended["big"].finish, run.ended["big"].reason) == (Finish.LENGTH, "kv_capacity")
    assert len(run.got["big"]) == 7, "16 positions hold the prompt and 6 tokens; the 7th needs no place of its own"
    assert run.got["next"] == expected_tokens(Request("next", (2,) * 6, 3))


def test_a_given_request_goes_on_where_it_stopped() -> None:
    whole = Request("r", (5, 6, 7), 8)
    tokens = tuple(expected_tokens(whole))
    run = fresh()
    run.add(replace(whole, produced=tokens[:3], age_s=2.0))
    run.drain()
    assert tuple(run.got["r"]) == tokens[3:]


def test_failed_workers_end_every_request_with_the_reason() -> None:
    run = fresh()
    for i in range(3):
        run.add(replace(GOOD, request_id=f"r{i}"))
    run.step()
    run.scheduler.fail_all("rank 1 died")
    run.take(run.scheduler.take_deltas())
    assert {d.reason for d in run.ended.values()} == {"rank 1 died"}
    assert len(run.ended) == 3
    assert run.scheduler.pool.available == 4
    run.scheduler.check()


def test_a_result_that_answers_no_plan_is_an_error() -> None:
    run = fresh()
    run.add(GOOD)
    plan = run.scheduler.schedule(1.0)
    assert plan is not None
    result = run.worker.execute(plan)
    with pytest.raises(ValueError, match="not under way"):
        run.scheduler.commit(result._replace(iteration=7), 1.0)
    with pytest.raises(ValueError, match="0 tokens where iteration 1 samples 1"):
        run.scheduler.commit(result._replace(tokens=()), 1.0)


def test_the_pool_gives_all_or_nothing_and_takes_nothing_twice() -> None:
    pool = BlockPool(3, 16)
    assert pool.allocate(4) is None
    assert pool.available == 3
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(blocks)
    pool.check([])
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 16)
