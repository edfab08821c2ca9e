"""What narrower KV costs in accuracy and gives in room: perplexity of a text for each type, and blocks a GiB.

    python benchmarks/kv_dtype.py [--json] [--model smollm2] [--chunk 256]

The text is benchmarks/lighthouse.txt, a story that was written for this purpose and is published nowhere else, so that
no model has seen it. It goes through the model in chunks, each of which reads what the ones before have written into
the pages; `--chunk 1` takes the kernel that decodes. Every type is compared with the model's own, token by token.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.attention import PAGE_SIZE, make_attention, make_layout
from workers.checkpoint import resolve
from workers.kv_cache import KvCache, bytes_per_block
from workers.kv_dtype import KV_DTYPES, choose_kv_dtype
from workers.model import LlamaModel
from workers.model_config import read_config
from workers.parallel import Ranks
from workers.tokenizer import Tokenizer
from workers.worker import choose_dtype

TEXT = Path(__file__).with_name("lighthouse.txt")


@dataclass(frozen=True)
class Row:
    """`change`: of the perplexity against the model's own type. `off`: mean absolute difference of the text's
    log-probabilities; `agreeing`: share of positions with the same likeliest token."""

    kv_dtype: str
    perplexity: float
    change: float
    off: float
    agreeing: float
    blocks_per_gib: float


class Reader:
    """One model, and what it gives for a text with KV in one type or another."""

    def __init__(self, name: str, device: torch.device) -> None:
        folder = resolve(name)
        self.device, self.config = device, read_config(folder)
        self.dtype = choose_dtype("auto", device, folder)
        self.longest = int(self.config.max_position_embeddings)
        self.model = LlamaModel(folder, self.config, Ranks(), device, self.dtype, self.longest)
        self.tokens = Tokenizer.load(folder).encode(TEXT.read_text(encoding="utf-8"))[: self.longest]
        self.block_size = PAGE_SIZE[device.type]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.model.layers), self.block_size, self.model.shard.kv_heads.size, self.model.shard.head_dim

    def logprobs(self, kv_dtype: torch.dtype, chunk: int) -> Tensor:
        """[tokens - 1, vocab] of what follows each token of the text."""
        layers, block_size, heads, head_dim = self.shape
        blocks = -(-len(self.tokens) // block_size)
        cache = KvCache(layers, blocks, block_size, heads, head_dim, kv_dtype, self.device)
        attend = make_attention("auto", self.device.type, self.dtype, kv_dtype)
        table = np.arange(blocks, dtype=np.int32)[None]
        rows = []
        for start, count in _chunks(len(self.tokens) - 1, chunk):
            layout = make_layout(
                np.array([start], np.int32), np.array([count], np.int32), table, block_size, self.device
            )
            tokens = torch.tensor(self.tokens[start : start + count], device=self.device)
            positions = torch.arange(start, start + count, device=self.device)
            every = torch.arange(count, device=self.device)
            logits = self.model(tokens, positions, cache, attend, layout, every)
            rows.append(logits.float().log_softmax(dim=-1).cpu())
        return torch.cat(rows)

    def row(self, name: str, logprobs: Tensor, own: Tensor) -> Row:
        following = torch.tensor(self.tokens[1:]).unsqueeze(1)
        chosen, of_own = (x.gather(1, following).double() for x in (logprobs, own))
        layers, block_size, heads, head_dim = self.shape
        return Row(
            kv_dtype=name,
            perplexity=math.exp(-float(chosen.mean())),
            change=math.exp(float(of_own.mean() - chosen.mean())) - 1,
            off=float((chosen - of_own).abs().mean()),
            agreeing=float((logprobs.argmax(1) == own.argmax(1)).double().mean()),
            blocks_per_gib=2**30 / bytes_per_block(layers, block_size, heads, head_dim, self._kept(name)),
        )

    def rows(self, chunk: int) -> Iterator[Row]:
        own = self.logprobs(self.dtype, chunk)
        yield self.row("auto", own, own)
        for name in KV_DTYPES:
            try:
                kept = self._kept(name)
            except ValueError:
                continue  # the device or the model has it not
            if kept != self.dtype:
                yield self.row(name, self.logprobs(kept, chunk), own)

    def _kept(self, name: str) -> torch.dtype:
        return choose_kv_dtype(name, self.dtype, self.device)


def _chunks(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, chunk):
        yield start, min(chunk, total - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunk", type=int, default=256)
    arguments = parser.parse_args()
    reader = Reader(arguments.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = list(reader.rows(arguments.chunk))
    if arguments.json:
        facts = {"model": arguments.model, "dtype": str(reader.dtype), "tokens": len(reader.tokens)}
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    print(f"{arguments.model} in {reader.dtype}, {len(reader.tokens):,} tokens in chunks of {arguments.chunk}")
    print(f"{'KV in':10}{'perplexity':>12}{'change':>10}{'mean |dlogp|':>14}{'same best':>11}{'blocks/GiB':>12}")
    for row in rows:
        print(
            f"{row.kv_dtype:10}{row.perplexity:12.4f}{row.change:+10.3%}{row.off:14.5f}{row.agreeing:11.1%}"
            f"{row.blocks_per_gib:12,.0f}"
        )


if __name__ == "__main__":
    main()
