"""The flash-attn package's varlen kernel over pages (Dao, FlashAttention-2, 2023). CUDA; pages of 256 tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from workers.attention.base import Layout
from workers.kv_cache import Pages


class FlashAttention:
    name: ClassVar[str] = "flash_attn"
    reads_as_stored: ClassVar[bool] = True

    def __init__(self) -> None:
        """Raises ImportError where the package is not installed."""
        from flash_attn import flash_attn_varlen_func

        self._attend: Any = flash_attn_varlen_func

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        out: Tensor = self._attend(
            q,
            k_pages.values,
            v_pages.values,
            cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k,
            max_seqlen_q=layout.max_seqlen_q,
            max_seqlen_k=layout.max_seqlen_k,
            causal=True,
            block_table=layout.block_table,
        )
        return out
