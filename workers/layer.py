"""One decoder layer of the Llama family or Qwen's, over a flat batch: [T, hidden] for the T tokens of an iteration.

H query and K key/value heads of this rank; D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.attention import Attention, Layout
from workers.elementwise import add_and_norm, gated, turn_and_keep
from workers.kv_cache import Pages
from workers.linear import Linear
from workers.loader import Weights
from workers.parallel import Ranks
from workers.parts import Part
from workers.shard import Shard


class Layer:
    """One decoder layer of this rank."""

    def __init__(self, weights: Weights, prefix: str, shard: Shard, ranks: Ranks, eps: float) -> None:
        self.shard, self._ranks, self.eps = shard, ranks, eps
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
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], to which the layer before still has `more` to add; returns both again. x changes in place.
        Writes this forward's keys and values into the pages `kv`. With `rows` [R], indices into T, what is returned is
        of these alone, [R, hidden]. Attention is of all rows, where it is of any: what a row gives does not depend on
        which others are asked for."""
        queries = self._keep(add_and_norm(x, more, self.input_norm, self.eps), angles, kv, layout)
        if rows is not None and len(rows) == 0:
            return x[:0], x[:0]
        attended = attend(queries, *kv, layout)  # [T, H, D]
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return x, self._from_attended(x, attended)

    def _keep(self, x: Tensor, angles: tuple[Tensor, Tensor], kv: tuple[Pages, Pages], layout: Layout) -> Tensor:
        """Writes keys and values; the queries [T, H, D]."""
        heads, kv_heads, d = self.shard.query_heads.size, self.shard.kv_heads.size, self.shard.head_dim
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, d)  # [T, H + 2K, D]
        return turn_and_keep(qkv, angles, self.qk_norm, self.eps, kv, layout.write_to)

    def _from_attended(self, x: Tensor, attended: Tensor) -> Tensor:
        """Changes x in place; what has still to be added to it."""
        more = self._ranks.sum(self.out(attended.flatten(1)))  # [T, hidden]
        inner = add_and_norm(x, more, self.inner_norm, self.eps)
        return self._ranks.sum(self.down(gated(self.gate_up(inner))))  # [T, hidden]


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
