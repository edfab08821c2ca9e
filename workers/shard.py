"""A tensor-parallel rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

from workers.model_config import ModelConfig
from workers.parallel import Ranks
from workers.parts import Part


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
