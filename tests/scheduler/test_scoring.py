"""Log-probabilities of prompts: each told once and in order, whatever becomes of the request on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.plan import IterationPlan, IterationResult
from scheduler.policies import make_policy
from scheduler.request import Finish, Request, TokenLogprob
from scheduler.sampling import SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.separated import World
from tests.scheduler.world import VOCAB, Run, expected_scores, expected_tokens

CONFIG = SchedulerConfig(num_blocks=16, block_size=4, max_model_len=64, vocab_size=VOCAB, max_running=4)
SCORED = Request("scored", tuple(range(1, 22)), 3, SamplingParams(prompt_logprobs=2))
PLAIN = replace(SCORED, request_id="plain", sampling=SamplingParams())


def running(chunk_size: int = 5, **changes: object) -> Run:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return Run.of(Scheduler(config, make_policy("chunked", chunk_size=chunk_size)))


def scores_in(plan: IterationPlan) -> list[bool]:
    return [chunk.score for forward in plan.forwards for chunk in forward.chunks]


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 64])
def test_they_come_with_the_first_token_whatever_the_chunks(chunk_size: int) -> None:
    run = running(chunk_size)
    run.add(SCORED)
    run.add(PLAIN)
    run.drain()
    assert run.scores["scored"] == expected_scores(SCORED)
    assert len(run.scores["scored"]) == len(SCORED.prompt) - 1
    assert run.scores["plain"] == []
    assert run.got["scored"] == run.got["plain"] == expected_tokens(SCORED)


def test_the_prompt_is_computed_whatever_is_cached_and_cached_for_others() -> None:
    run = running()
    run.add(PLAIN)
    run.drain()
    run.add(SCORED)
    run.drain()
    assert run.cached["scored"] == 0
    assert run.scores["scored"] == expected_scores(SCORED)
    other = running()
    other.add(SCORED)
    other.drain()
    other.add(PLAIN)
    other.drain()
    assert other.cached["plain"] == 20


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(prompt_logprobs=0)])
def test_no_tokens_wanted(sampling: SamplingParams) -> None:
    """It ends with its prompt, even where the next token would have stopped it."""
    request = replace(SCORED, max_tokens=0, sampling=sampling, stop_token_ids=tuple(range(VOCAB)))
    run = running()
    run.add(request)
    run.add(replace(PLAIN, prompt=(7, 7, 7)))
    run.drain()
    assert run.got["scored"] == []
    assert run.ended["scored"].finish is Finish.LENGTH
    assert run.scores["scored"] == expected_scores(request)
    assert run.got["plain"] == expected_tokens(replace(PLAIN, prompt=(7, 7, 7)))
    assert {timing.request_id for timing in run.scheduler.take_timings()} == {"plain"}, "it had no token"


def test_a_first_token_that_stops_it_leaves_them() -> None:
    run = running()
    run.add(replace(SCORED, stop_token_ids=tuple(range(VOCAB))))
    run.drain()
    assert run.ended["scored"].finish is Finish.STOP
    assert run.scores["scored"] == expected_scores(SCORED)


@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("swap_blocks", [0, 16])
def test_lost_workers_and_later_preemptions_repeat_nothing(after: int, swap_blocks: int) -> None:
    run = running(swap_blocks=swap_blocks, num_blocks=8)
    run.add(replace(SCORED, request_id="older", prompt=(3,) * 12, max_tokens=18))
    run.add(SCORED)
    for _ in range(after):
        run.step()
    run.scheduler.requeue_all()
    run.worker.replace()
    run.drain()
    assert run.scores["scored"] == expected_scores(SCORED)
    assert run.got["scored"] == expected_tokens(SCORED)


def test_what_was_produced_before_has_had_them() -> None:
    run = running()
    run.add(replace(SCORED, produced=tuple(expected_tokens(SCORED)[:1])))
    plan = run.step()
    assert plan is not None
    assert scores_in(plan) == [False]
    run.drain()
    assert run.scores["scored"] == []


def test_separated_groups() -> None:
    """They come of the group that computes the prompt; a prompt alone never leaves it."""
    world = World(replace(CONFIG, num_blocks=40), ["prefill", "decode"], chunk_size=8)
    alone = replace(SCORED, request_id="alone", max_tokens=0)
    world.add(SCORED, 0)
    world.add(alone, 0)
    world.drain()
    assert world.scores == {"scored": expected_scores(SCORED), "alone": expected_scores(alone)}
    assert world.got["scored"] == expected_tokens(SCORED)
    assert world.ended["alone"].finish is Finish.LENGTH
    assert [moved.tokens for moved in world.moved] == [len(SCORED.prompt)]
    assert world.all_free


def test_a_model_that_gives_no_numbers_fails_that_request_alone() -> None:
    run = running(chunk_size=64)
    run.add(SCORED)
    run.add(replace(SCORED, request_id="healthy"))
    plan = run.scheduler.schedule(1.0)
    assert plan is not None
    assert scores_in(plan) == [True, True]
    result = run.worker.execute(plan)
    broken = (TokenLogprob(float("nan")), *result.prompt_logprobs[0][1:])
    run.take(run.scheduler.commit(result._replace(prompt_logprobs=(broken, result.prompt_logprobs[1])), 1.0))
    run.drain()
    assert run.ended["scored"].finish is Finish.ERROR
    assert run.scores["healthy"] == expected_scores(SCORED)


def test_an_answer_without_them_is_refused() -> None:
    run = running(chunk_size=64)
    run.add(SCORED)
    plan = run.scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(ValueError, match="scored"):
        run.scheduler.commit(IterationResult(plan.iteration, (1,)), 1.0)
