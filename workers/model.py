"""The Llama family and Qwen's as one flat forward: all tokens of all sequences side by side, [T, hidden].

T tokens of the iteration; H query and K key/value heads of this rank; D head_dim; S rows that are sampled from. On a
tensor-parallel rank the heads, the MLP's inner dimension and the vocabulary are this rank's part, and a sum over the
ranks follows each of the two projections back to the hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention import Attention, Layout
from workers.attention.cpu import CpuAttention
from workers.cpu_layers import CpuLayers
from workers.elementwise import add_and_norm
from workers.kv_cache import KvCache
from workers.layer import Layer
from workers.linear import Linear
from workers.loader import Weights
from workers.model_config import ModelConfig
from workers.parallel import Ranks
from workers.rope import Rope
from workers.shard import Shard


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
            self._on_cpu = CpuLayers(self.layers, ranks) if CpuLayers.take(self.layers) else None
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
        return self.logits(self.hidden(tokens, positions, kv, attend, layout, sample_rows))

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KvCache,
        attend: Attention,
        layout: Layout,
        rows: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions [T]. Returns what the last layer gives, [T, hidden]; of `rows` [R], indices into T, alone
        where they are told, [R, hidden]: most tokens of a prompt are of no use but for their keys and values, and are
        not gone on with once these are there. The same rows on every rank."""
        x = self._embed(tokens)  # [T, hidden]
        angles = self.rope.at(positions, x.dtype)
        if self._on_cpu is not None and isinstance(attend, CpuAttention):
            return self._on_cpu.hidden(x, angles, kv, attend, layout, rows)
        more = None
        for layer, pages in zip(self.layers, kv.layers, strict=True):
            asked = rows if layer is self.layers[-1] else None
            x, more = layer(x, more, angles, pages, attend, layout, asked)
        return x if more is None else x.add_(more)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden]. Returns logits [S, vocab], the same on every rank."""
        sampled = add_and_norm(hidden, None, self.norm, self._eps)  # [S, hidden]
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
