"""torch's own varlen attention over pages. CUDA; the keys are not split, so that no result depends on its batch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.attention.base import Layout
from workers.kv_cache import Pages


class VarlenAttention:
    name: ClassVar[str] = "varlen"
    reads_as_stored: ClassVar[bool] = True

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        out = varlen_attn(
            q,
            k_pages.values,
            v_pages.values,
            cu_seq_q=layout.cu_seqlens_q,
            cu_seq_k=layout.cu_seqlens_k,  # not needed beside seqused_k, but the default kernel insists on it
            max_q=layout.max_seqlen_q,
            max_k=layout.max_seqlen_k,
            window_size=(-1, 0),
            enable_gqa=q.shape[1] != k_pages.kv_heads,
            seqused_k=layout.seqused_k,
            block_table=layout.block_table,
            num_splits=1,
        )
        assert isinstance(out, Tensor)  # a tuple only where auxiliary outputs are asked for
        return out
