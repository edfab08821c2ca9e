"""torch's own varlen attention over pages. CUDA; the keys are not split, so that no result depends on its batch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.attention.base import Layout


class VarlenAttention:
    name: ClassVar[str] = "varlen"

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, layout: Layout) -> Tensor:
        out = varlen_attn(
            q,
            k_pages,
            v_pages,
            cu_seq_q=layout.cu_seqlens_q,
            cu_seq_k=layout.cu_seqlens_k,  # not needed beside seqused_k, but the default kernel insists on it
            max_q=layout.max_seqlen_q,
            max_k=layout.max_seqlen_k,
            window_size=(-1, 0),
            enable_gqa=q.shape[1] != k_pages.shape[2],
            seqused_k=layout.seqused_k,
            block_table=layout.block_table,
            num_splits=1,
        )
        assert isinstance(out, Tensor)  # a tuple only where auxiliary outputs are asked for
        return out
