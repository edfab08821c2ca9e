"""The Llama family and Qwen's as one flat forward: all tokens of all sequences side by side, [T, hidden].

T tokens of the iteration; H query and K key/value heads of this rank; D head_dim; S rows that are sampled from. On a
tensor-parallel rank the heads, the MLP's inner dimension and the vocabulary are this rank's part, and a sum over the
ranks follows each of the two projections back to the hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention import Attention, Layout
from workers.elementwise import add_and_norm, gated, turn_and_keep
from workers.kv_cache import KvCache, Pages
from workers.linear import Linear
from workers.loader import Weights
from workers.model_config import ModelConfig
from workers.parallel import Ranks
from workers.parts import Part
from workers.rope import Rope


def check_degree(config: ModelConfig, ranks: int) -> None:
    """Raises ValueError where there are more ranks than KV heads: a KV head is not divided."""
    if ranks > config.num_key_value_heads:
        heads = config.num_key_value_heads
        raise ValueError(f"tensor-parallel degree {ranks} is too large: the model has {heads} KV heads")


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of the model's dimensions."""

    kv_heads: Part
    query_heads: Part
    inner: Part
    vocab: Part
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Shard:
        """Raises ValueError where there are more ranks than KV heads."""
        check_degree(config, ranks.size)
        kv_heads = config.num_key_value_heads
        part = ranks.part(kv_heads)
        return cls(
            kv_heads=part,
            query_heads=part.scaled(config.num_attention_heads // kv_heads),
            inner=ranks.part(config.intermediate_size),
            vocab=ranks.part(config.vocab_size),
            head_dim=config.head_dim,
        )


class Layer:
    """One decoder layer of this rank."""

    def __init__(self, weights: Weights, prefix: str, shard: Shard, ranks: Ranks, eps: float) -> None:
        self._shard, self._ranks, self._eps = shard, ranks, eps
        heads, kv = shard.query_heads.scaled(shard.head_dim), shard.kv_heads.scaled(shard.head_dim)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.input_norm = weights.rows(f"{prefix}.input_layernorm.weight")
        self.inner_norm = weights.rows(f"{prefix}.post_attention_layernorm.weight")
        self.qkv = fused(
            weights, [(f"{attention}.q_proj", heads), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        )
        self.qk_norm = head_norms(weights, attention, shard)
        self.out = row_parallel(weights, f"{attention}.o_proj", heads, ranks)
        self.gate_up = fused(weights, [(f"{mlp}.gate_proj", shard.inner), (f"{mlp}.up_proj", shard.inner)])
        self.down = row_parallel(weights, f"{mlp}.down_proj", shard.inner, ranks)

    def __call__(
        self,
        x: Tensor,
        more: Tensor | None,
        angles: tuple[Tensor, Tensor],
        kv: tuple[Pages, Pages],
        attend: Attention,
        layout: Layout,
    ) -> Tensor:
        """x [T, hidden], to which the layer before still has `more` to add; returns what this one has. x changes in
        place. Writes this forward's keys and values into the pages `kv`."""
        more = self._attention(add_and_norm(x, more, self.input_norm, self._eps), angles, kv, attend, layout)
        return self._mlp(add_and_norm(x, more, self.inner_norm, self._eps))

    def _attention(
        self, x: Tensor, angles: tuple[Tensor, Tensor], kv: tuple[Pages, Pages], attend: Attention, layout: Layout
    ) -> Tensor:
        heads, kv_heads, d = self._shard.query_heads.size, self._shard.kv_heads.size, self._shard.head_dim
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, d)  # [T, H + 2K, D]
        q = turn_and_keep(qkv, angles, self.qk_norm, self._eps, kv, layout.write_to)  # [T, H, D]
        attended = attend(q, *kv, layout)  # [T, H, D]
        return self._ranks.sum(self.out(attended.reshape(-1, heads * d)))  # [T, hidden]

    def _mlp(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self.down(gated(self.gate_up(x))))  # [T, hidden]


class LlamaModel:
    """Loads this rank's shard at construction; a call is one flat forward."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        ranks: Ranks,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config, self.ranks, self.shard = config, ranks, Shard.of(config, ranks)
        self.rope = Rope(config, max_model_len, device)
        self._eps = config.rms_norm_eps
        with Weights(folder, dtype, device, progress or (lambda count: None)) as weights:
            self.layers = [
                Layer(weights, f"model.layers.{i}", self.shard, ranks, self._eps)
                for i in range(config.num_hidden_layers)
            ]
            self.norm = weights.rows("model.norm.weight")
            tied = config.tie_word_embeddings or "lm_head.weight" not in weights
            embedding = weights.rows("model.embed_tokens.weight", self.shard.vocab)  # [vocab part, hidden]
            self.head = Linear(embedding if tied else weights.rows("lm_head.weight", self.shard.vocab))
            self._look_up = self.head.rows if tied else partial(F.embedding, weight=embedding)
            self.bytes_read = weights.bytes_read

    @torch.inference_mode()
    def __call__(
        self, tokens: Tensor, positions: Tensor, kv: KvCache, attend: Attention, layout: Layout, sample_rows: Tensor
    ) -> Tensor:
        """tokens, positions [T]; sample_rows [S] indices into T. Returns logits [S, vocab], the same on every rank."""
        return self.logits(self.hidden(tokens, positions, kv, attend, layout), sample_rows)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, positions: Tensor, kv: KvCache, attend: Attention, layout: Layout) -> Tensor:
        """tokens, positions [T]. Returns what the last layer gives, [T, hidden]."""
        x = self._embed(tokens)  # [T, hidden]
        angles = self.rope.at(positions, x.dtype)
        more = None
        for layer, pages in zip(self.layers, kv.layers, strict=True):
            more = layer(x, more, angles, pages, attend, layout)
        return x if more is None else x.add_(more)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [T, hidden], rows [S] indices into T. Returns logits [S, vocab], the same on every rank."""
        sampled = add_and_norm(hidden.index_select(0, rows), None, self.norm, self._eps)  # [S, hidden]
        if sampled.shape[0] == 0:
            return sampled.new_empty(0, self.config.vocab_size)
        return self.ranks.gather_columns(self.head(sampled), self.config.vocab_size)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return self._look_up(tokens)
        local = tokens - self.shard.vocab.start
        mine = (local >= 0) & (local < self.shard.vocab.size)
        rows = self._look_up(local.clamp(0, self.shard.vocab.size - 1))
        return self.ranks.sum(rows * mine.unsqueeze(1))


def head_norms(weights: Weights, attention: str, shard: Shard) -> Tensor | None:
    """Weights [H + K, D] of the norms that Qwen3 has for every query and key head; None where there are none."""
    names = (f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
    if names[0] not in weights:
        return None
    q, k = (weights.rows(name) for name in names)  # [D] each
    return torch.cat([q.expand(shard.query_heads.size, -1), k.expand(shard.kv_heads.size, -1)])


def fused(weights: Weights, parts: list[tuple[str, Part]]) -> Linear:
    """Projections of the same input as one matrix, each of them this rank's rows (its output's part)."""
    weight = torch.cat([weights.rows(f"{name}.weight", part) for name, part in parts])
    names = [f"{name}.bias" for name, _ in parts]
    bias = None
    if all(name in weights for name in names):
        bias = torch.cat([weights.rows(name, part) for name, (_, part) in zip(names, parts, strict=True)])
    return Linear(weight, bias)


def row_parallel(weights: Weights, name: str, part: Part, ranks: Ranks) -> Linear:
    """A projection of which this rank has some input columns; its bias is added once, by rank 0."""
    bias = weights.rows(f"{name}.bias") if f"{name}.bias" in weights and ranks.rank == 0 else None
    return Linear(weights.columns(f"{name}.weight", part), bias)
