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
from workers.drawing import _noise, draw, draw_torch
from workers.randomness import keys
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


def key(*numbers: int) -> np.ndarray:
    return keys(*(np.array([number], dtype=np.uint64) for number in numbers))


def noise(of: np.ndarray, vocab: int) -> np.ndarray:
    return _noise(torch.from_numpy(of.astype(np.int64)), vocab).numpy()


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 10_000))
def test_random_numbers_are_keyed_by_seed_choice_and_position(seed: int, choice: int, position: int) -> None:
    value = key(seed, choice, position)
    assert value == key(seed, choice, position)
    assert value != key(seed, choice + 1, position)
    assert value != key(seed, choice, position + 1)
    assert value != key(seed ^ 1, choice, position)


def test_noise_is_uniform_over_positions_and_tokens() -> None:
    n = 100_000
    zeros = np.zeros(n, dtype=np.uint64)
    over_positions = noise(keys(zeros, zeros, np.arange(n, dtype=np.uint64)), 1)[:, 0]
    over_tokens = noise(key(7, 0, 3), n)[0]
    for values in (over_positions, over_tokens):
        assert values.min() > 0
        assert values.max() < 1
        assert abs(values.mean() - 0.5) < 0.005
        assert abs(values.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_a_token_has_the_noise_of_the_published_generator() -> None:
    """SplitMix64 from the state 1234567: its first numbers as Vigna's reference implementation prints them."""
    published = np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], dtype=np.uint64)
    expected = ((published >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    assert noise(np.array([1234567], dtype=np.uint64), 3)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_leaving_out_who_cannot_win_changes_nothing(spread: float) -> None:
    rows, vocab = 300, 2000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * spread
    row_keys = keys(*(np.arange(rows, dtype=np.uint64),) * 3)
    uniform = torch.from_numpy(noise(row_keys, vocab))
    logits[:, ::3] = -math.inf
    everybody = (logits.double() / 0.7 - torch.log(-torch.log(uniform))).argmax(dim=1)
    temperatures = torch.full((rows, 1), 0.7, dtype=torch.float64)
    for by in (draw, draw_torch):  # the kernel, and the plain path
        assert by(logits, temperatures, row_keys).tolist() == everybody.tolist()


def test_rounding_of_the_scores_hardly_ever_changes_a_draw() -> None:
    """Scores in other last bits, as another shape of the batch gives them, over a vocabulary of the usual size."""
    rows, vocab = 400, 49_152
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    other = logits * (1 + 1e-6 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)))
    settings = [row(SamplingParams(seed=seed)) for seed in range(rows)]
    changed = sum(a != b for a, b in zip(sample(logits, settings), sample(other, settings), strict=True))
    assert changed == 0


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
