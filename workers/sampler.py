"""From logits to tokens. Each row is treated by its own parameters alone, whatever else is in the batch.

Order of the steps, as elsewhere: bias and penalties, what a grammar forbids, temperature, top-k, top-p, min-p, then a
draw (`workers.drawing`) from what is left. Log-probabilities are those of the model, before any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams
from workers.drawing import draw
from workers.greedy import likeliest
from workers.randomness import keys


@dataclass(frozen=True, slots=True)
class Row:
    """What one sampled row needs: its parameters, the tokens so far and how many of them are prompt. The new token's
    position is their number. `allowed` [vocab] are the tokens that may be drawn, None for all; `refusal` says why none
    may."""

    params: SamplingParams
    tokens: NDArray[np.int32]
    prompt_tokens: int
    allowed: NDArray[np.bool_] | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token of a row, or why there is none."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def sample(logits: Tensor, rows: list[Row]) -> list[Sampled]:
    """logits [rows, vocab] (not changed) -> one result a row."""
    if not rows:
        return []
    scores = logits.float()
    tokens, healthy = likeliest(scores)
    touched = [i for i, row in enumerate(rows) if row.allowed is not None or _adjusts(row.params)]
    adjusted = _adjust(scores, rows, touched) if touched else scores
    greedy = [i for i in touched if rows[i].params.greedy]
    plain = [i for i, row in enumerate(rows) if not row.params.greedy and not _filters(row.params)]
    filtered = [i for i, row in enumerate(rows) if not row.params.greedy and _filters(row.params)]
    if greedy:
        tokens[greedy], _ = likeliest(_take(adjusted, greedy))
    if plain:
        tokens[plain] = _draw(_take(adjusted, plain), rows, plain).cpu().numpy()
    if filtered:
        tokens[filtered] = _draw(_filtered(_take(adjusted, filtered), rows, filtered), rows, filtered).cpu().numpy()
    logprobs = _logprobs(scores, rows, tokens)
    return [_sampled(row, int(tokens[i]), bool(healthy[i]), logprobs.get(i)) for i, row in enumerate(rows)]


def _sampled(row: Row, token: int, healthy: bool, logprob: TokenLogprob | None) -> Sampled:
    error = row.refusal
    if not healthy:
        error = "the model gave no finite scores"
    elif row.allowed is not None and not row.allowed[token]:
        error = "the model gave no finite score to any token that fits the response format"
    return Sampled(-1, error=error) if error else Sampled(token, logprob)


def _take(x: Tensor, which: list[int]) -> Tensor:
    """Those rows, without a copy where it is all of them."""
    return x if len(which) == x.shape[0] else x[which]


def _filters(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def _adjust(scores: Tensor, rows: list[Row], touched: list[int]) -> Tensor:
    """Bias and penalties, and -inf for what is not allowed, on the rows that have any of it."""
    scores = scores.clone()
    for i in touched:
        _adjust_row(scores[i], rows[i])
        if (allowed := rows[i].allowed) is not None:
            scores[i].masked_fill_(torch.from_numpy(~allowed).to(scores.device), -torch.inf)
    return scores


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 or p.logit_bias)


def _adjust_row(scores: Tensor, row: Row) -> None:
    """Presence and frequency count what was generated; repetition the prompt too (Keskar et al., CTRL, 2019)."""
    p = row.params
    if p.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(row.tokens).astype(np.int64)).to(scores.device)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        generated, counts = np.unique(row.tokens[row.prompt_tokens :], return_counts=True)
        index = torch.from_numpy(generated.astype(np.int64)).to(scores.device)
        times = torch.from_numpy(counts.astype(np.float32)).to(scores.device)
        scores[index] -= p.presence_penalty + p.frequency_penalty * times
    if p.logit_bias:
        index = torch.tensor([token for token, _ in p.logit_bias], device=scores.device)
        bias = torch.tensor([value for _, value in p.logit_bias], device=scores.device)
        scores.index_add_(0, index, bias)


def _draw(scores: Tensor, rows: list[Row], which: list[int]) -> Tensor:
    return draw(scores, _temperatures(rows, which, scores), _keys(rows, which))


def _temperatures(rows: list[Row], which: list[int], like: Tensor) -> Tensor:
    return _column([rows[i].params.temperature for i in which], like)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _keys(rows: list[Row], which: list[int]) -> NDArray[np.uint64]:
    seeds = np.array([rows[i].params.seed for i in which], dtype=np.uint64)
    choices = np.array([rows[i].params.choice for i in which], dtype=np.uint64)
    positions = np.array([len(rows[i].tokens) for i in which], dtype=np.uint64)
    return keys(seeds, choices, positions)


def _filtered(scores: Tensor, rows: list[Row], which: list[int]) -> Tensor:
    """-inf for what top-k, top-p (the smallest set that reaches p, at least one token) and min-p leave out."""
    chosen = scores.double()
    shifted = (chosen - chosen.max(dim=1, keepdim=True).values) / _temperatures(rows, which, scores)
    ordered, index = torch.softmax(shifted, dim=1).sort(dim=1, descending=True, stable=True)
    vocab = ordered.shape[1]
    params = [rows[i].params for i in which]
    rank = torch.arange(vocab, device=ordered.device).unsqueeze(0)
    keep = rank < _column([p.top_k or vocab for p in params], ordered)
    kept = ordered * keep
    before = kept.cumsum(dim=1) - kept
    keep &= before < _column([p.top_p for p in params], ordered) * kept.sum(dim=1, keepdim=True)
    keep &= ordered >= _column([p.min_p for p in params], ordered) * ordered[:, :1]
    keep[:, 0] = True
    return scores.masked_fill(~torch.zeros_like(keep).scatter(1, index, keep), -torch.inf)


def _logprobs(scores: Tensor, rows: list[Row], tokens: NDArray[np.int64]) -> dict[int, TokenLogprob]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in wanted]
    return dict(zip(wanted, token_logprobs(_take(scores, wanted), tokens[wanted], counts), strict=True))


def token_logprobs(scores: Tensor, tokens: NDArray[np.int64], counts: list[int]) -> list[TokenLogprob]:
    """Of one token in each row of logits [rows, vocab], with so many of the row's likeliest alternatives."""
    table = torch.log_softmax(scores, dim=1)
    chosen = table.gather(1, torch.from_numpy(tokens).to(table.device).unsqueeze(1)).squeeze(1).tolist()
    most = max(counts, default=0)
    top = table.topk(most, dim=1) if most else None
    found = []
    for k, count in enumerate(counts):
        pairs = [] if top is None else zip(top.indices[k, :count].tolist(), top.values[k, :count].tolist(), strict=True)
        found.append(TokenLogprob(chosen[k], tuple(pairs)))
    return found
