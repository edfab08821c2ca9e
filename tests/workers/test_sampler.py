"""The sampler: filters, penalties, log-probabilities, and numbers that depend on (seed, choice, position) alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.sampling import SamplingParams
from workers.randomness import uniforms
from workers.sampler import Row, sample

VOCAB = 50
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def row(params: SamplingParams, tokens: tuple[int, ...] = (1, 2), prompt: int = 2) -> Row:
    return Row(params, np.array(tokens, dtype=np.int32), prompt)


def draws(params: SamplingParams, logits: torch.Tensor = LOGITS, count: int = 4000) -> np.ndarray:
    rows = [row(replace(params, seed=seed)) for seed in range(count)]
    return np.array([s.token for s in sample(logits.expand(count, -1), rows)])


def test_greedy_takes_the_largest() -> None:
    assert sample(LOGITS, [row(SamplingParams(temperature=0.0))])[0].token == int(LOGITS.argmax())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_frequencies_are_those_of_the_distribution(temperature: float) -> None:
    counts = np.bincount(draws(SamplingParams(temperature=temperature), count=20_000), minlength=VOCAB)
    expected = torch.softmax(LOGITS[0].double() / temperature, 0).numpy() * counts.sum()
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 100, "49 degrees of freedom: above 100 once in 20,000 times, and the seeds are fixed"


def test_top_k_top_p_and_min_p_leave_only_what_they_should() -> None:
    p = torch.softmax(LOGITS[0].double(), 0)
    order = p.argsort(descending=True)
    assert set(draws(SamplingParams(top_k=3))) == set(order[:3].tolist())
    kept = int((p[order].cumsum(0) < 0.7).sum()) + 1
    assert set(draws(SamplingParams(top_p=0.7))) == set(order[:kept].tolist())
    assert set(draws(SamplingParams(min_p=0.3))) == set((p >= 0.3 * p.max()).nonzero().flatten().tolist())
    assert set(draws(SamplingParams(top_p=1e-9))) == {int(order[0])}
    assert set(draws(SamplingParams(top_k=1, temperature=5.0))) == {int(order[0])}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert set(draws(SamplingParams(temperature=1e-300), count=50)) == {int(LOGITS.argmax())}


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(params, min_size=1, max_size=8), st.randoms())
def test_a_row_does_not_depend_on_its_batch(many: list[SamplingParams], rnd: object) -> None:
    logits = torch.randn(len(many), VOCAB, generator=torch.Generator().manual_seed(len(many)))
    rows = [row(p, tokens=(3, 4, 4, 5), prompt=2) for p in many]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert [s.token for s in together] == [s.token for s in alone]


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 10_000))
def test_random_numbers_are_keyed_by_seed_choice_and_position(seed: int, choice: int, position: int) -> None:
    def number(*key: int) -> float:
        return float(uniforms(*(np.array([k], dtype=np.uint64) for k in key))[0])

    value = number(seed, choice, position)
    assert 0 <= value < 1
    assert value == number(seed, choice, position)
    assert value != number(seed, choice + 1, position)
    assert value != number(seed, choice, position + 1)
    assert value != number(seed ^ 1, choice, position)


def test_random_numbers_are_uniform_over_positions() -> None:
    n = 100_000
    zeros = np.zeros(n, dtype=np.uint64)
    values = uniforms(zeros, zeros, np.arange(n, dtype=np.uint64))
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(values.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_penalties_count_what_they_should() -> None:
    greedy = SamplingParams(temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.5, 2.0

    def chosen(p: SamplingParams, tokens: tuple[int, ...], prompt: int) -> int:
        return sample(logits, [row(p, tokens, prompt)])[0].token

    assert chosen(greedy, (5, 5), 2) == 5
    assert chosen(replace(greedy, presence_penalty=1.0), (5, 5), 2) == 5, "the prompt does not count"
    assert chosen(replace(greedy, presence_penalty=1.0), (1, 5), 1) == 6
    assert chosen(replace(greedy, frequency_penalty=0.4), (1, 5), 1) == 5
    assert chosen(replace(greedy, frequency_penalty=0.4), (1, 5, 5), 1) == 6
    assert chosen(replace(greedy, repetition_penalty=1.4), (5, 1), 2) == 6, "the prompt counts for repetition"
    assert chosen(replace(greedy, logit_bias=((7, 5.0), (5, -100.0))), (1,), 1) == 7


def test_logprobs_are_the_models_own() -> None:
    table = torch.log_softmax(LOGITS[0], 0)
    found = sample(LOGITS, [row(SamplingParams(temperature=0.0, logprobs=4, logit_bias=((9, 100.0),)))])[0]
    assert found.token == 9
    assert found.logprob is not None
    assert found.logprob.logprob == pytest.approx(float(table[9]))
    assert [t for t, _ in found.logprob.top] == table.argsort(descending=True)[:4].tolist()
    assert [v for _, v in found.logprob.top] == pytest.approx(table.sort(descending=True).values[:4].tolist())
    only_own = sample(LOGITS, [row(SamplingParams(temperature=0.0, logprobs=0))])[0].logprob
    assert only_own is not None
    assert only_own.top == ()


def test_scores_that_are_not_finite_fail_their_row_alone() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = math.nan
    logits[2, :] = math.inf
    greedy = row(SamplingParams(temperature=0.0))
    found = sample(logits, [greedy, row(SamplingParams()), greedy])
    assert found[0].error is None
    assert found[1].error == found[2].error == "the model gave no finite scores"


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
