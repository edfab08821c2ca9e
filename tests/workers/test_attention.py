"""One metadata for three backends: each against a dense reference, by exactly the arguments that it is given."""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.conftest import save_tiny
from workers.attention import Attention, Layout, check_page_size, make_attention, make_layout
from workers.attention import varlen as varlen_module
from workers.attention.cpu import CpuAttention
from workers.attention.paged_chunk import Chunks, paged_chunk, paged_chunk_torch
from workers.attention.paged_decode import Singles, paged_decode, paged_decode_torch
from workers.kv_cache import KvCache, Pages
from workers.loader import Weights
from workers.model import LlamaModel
from workers.model_config import read_config
from workers.parallel import Ranks

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4
Segments = list[tuple[int, int]]
"""(start, count) of each segment."""

segments_of = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6)
MIXED: Segments = [(0, 5), (7, 1), (0, 1), (12, 4), (30, 1), (3, 12)]


class Case:
    """Random keys and values of every segment's whole context, laid out in shuffled pages, and random queries."""

    def __init__(self, segments: Segments, block_size: int = BLOCK, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        contexts = [start + count for start, count in segments]
        self.k = [torch.randn(context, KV_HEADS, DIM, generator=generator) for context in contexts]
        self.v = [torch.randn(context, KV_HEADS, DIM, generator=generator) for context in contexts]
        self.q = [torch.randn(count, HEADS, DIM, generator=generator) for _, count in segments]
        needed = [math.ceil(context / block_size) for context in contexts]
        order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        shape = (len(order), block_size, KV_HEADS, DIM)
        self.k_pages, self.v_pages = Pages(torch.full(shape, 1e4)), Pages(torch.full(shape, 1e4))  # not to be read
        tables = np.zeros((len(segments), max(needed) + 2), dtype=np.int32)
        for i, count in enumerate(needed):
            tables[i, :count], order = order[:count], order[count:]
        starts = np.array([start for start, _ in segments], dtype=np.int32)
        counts = np.array([count for _, count in segments], dtype=np.int32)
        self.layout = make_layout(starts, counts, tables, block_size, torch.device("cpu"))
        for i, (start, count) in enumerate(segments):
            for position in range(start):  # history, written by earlier iterations
                block, offset = tables[i, position // block_size], position % block_size
                self.k_pages.values[block, offset] = self.k[i][position]
                self.v_pages.values[block, offset] = self.v[i][position]
            rows = slice(int(self.layout.cu_seqlens_q[i]), int(self.layout.cu_seqlens_q[i + 1]))
            places = self.layout.write_to[rows]
            self.k_pages.write(places, self.k[i][start : start + count])
            self.v_pages.write(places, self.v[i][start : start + count])

    @property
    def queries(self) -> Tensor:
        return torch.cat(self.q)

    def reference(self) -> Tensor:
        return torch.cat([dense(q, k, v) for q, k, v in zip(self.q, self.k, self.v, strict=True)])


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by its definition; the queries are the last of the keys' positions. float64 inside."""
    count, context, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), key) / math.sqrt(q.shape[2])
    later = torch.arange(context)[None] > torch.arange(context - count, context)[:, None]
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).float()


def check(attend: Attention, case: Case) -> None:
    out = attend(case.queries, case.k_pages, case.v_pages, case.layout)
    torch.testing.assert_close(out, case.reference(), atol=2e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(segments_of, st.sampled_from([1, 4, 16]))
def test_cpu(segments: Segments, block_size: int) -> None:
    check(CpuAttention(), Case(segments, block_size))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=14))
def test_the_decode_kernel_equals_the_plain_path(starts: list[int]) -> None:
    case = Case([(start, 1) for start in starts])
    arguments = (case.queries, case.k_pages, case.v_pages, case.layout.block_table, case.layout.seqused_k)
    out = np.empty_like(case.queries.numpy())
    singles = Singles(torch.arange(len(starts)), case.layout.block_table, case.layout.seqused_k)
    paged_decode(case.queries.numpy(), case.k_pages, case.v_pages, singles, out)
    torch.testing.assert_close(torch.from_numpy(out), paged_decode_torch(*arguments), atol=1e-5, rtol=1e-5)


def test_a_key_that_is_no_number_spoils_its_sequence_and_no_other() -> None:
    case = Case([(20, 1), (9, 1), (40, 1)])
    case.k_pages.values[case.layout.block_table[1, 0].item(), 3] = float("nan")
    finite = CpuAttention()(case.queries, case.k_pages, case.v_pages, case.layout).isfinite().flatten(1)
    assert [finite[0].all(), finite[1].any(), finite[2].all()] == [True, False, True]


def chunks_of(layout: Layout) -> Chunks:
    first_rows = (layout.counts.cumsum() - layout.counts).astype(np.int32)
    return Chunks(first_rows, layout.counts, layout.used, layout.table, KV_HEADS, HEADS // KV_HEADS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), min_size=1, max_size=4), st.sampled_from([5, 16]))
def test_the_chunk_kernel_equals_the_plain_path(segments: Segments, block_size: int) -> None:
    case = Case(segments, block_size)
    compiled, plain = (torch.full_like(case.queries, math.nan) for _ in range(2))
    chunks = chunks_of(case.layout)
    paged_chunk(case.queries.numpy(), case.k_pages, case.v_pages, chunks, compiled.numpy())
    paged_chunk_torch(case.queries, case.k_pages, case.v_pages, chunks, plain)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


def test_a_query_feels_nothing_of_how_its_prompt_is_cut() -> None:
    """Bit by bit: whole, in two chunks, and beside another sequence."""
    context = 200
    whole = Case([(0, context)], seed=3)
    expected = CpuAttention()(whole.queries, whole.k_pages, whole.v_pages, whole.layout)
    tables = np.concatenate([whole.layout.table, np.zeros_like(whole.layout.table)])
    for cut in (37, 64, 101):
        starts, counts = np.array([cut, 0], np.int32), np.array([context - cut, 3], np.int32)
        layout = make_layout(starts, counts, tables, BLOCK, torch.device("cpu"))
        queries = torch.cat([whole.queries[cut:], torch.zeros(3, HEADS, DIM)])
        out = CpuAttention()(queries, whole.k_pages, whole.v_pages, layout)
        assert torch.equal(out[: context - cut], expected[cut:])


def test_what_is_no_number_stays_none() -> None:
    case = Case([(0, 80)])
    case.k_pages.values[case.layout.table[0, 0], 1] = math.nan  # the second position's key
    out = CpuAttention()(case.queries, case.k_pages, case.v_pages, case.layout)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


def from_pages(pages: Tensor, table: Tensor, used: int) -> Tensor:
    return pages[table.long()].flatten(0, 1)[:used]


def dense_by_arguments(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_q: Tensor, used: list[int], table: Tensor, max_q: int, max_k: int
) -> Tensor:
    """What a paged varlen kernel computes, from nothing but its arguments."""
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_q, table))
    assert max_q == int(cu_q.diff().max())
    assert max_k == max(used)
    pieces = []
    for i, count in enumerate(used):
        queries = q[int(cu_q[i]) : int(cu_q[i + 1])]
        pieces.append(dense(queries, from_pages(k_pages, table[i], count), from_pages(v_pages, table[i], count)))
    return torch.cat(pieces)


def test_flash_attn_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's call, replaced by its definition: a wrong cu_seqlens or block table gives a wrong result."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal
        assert block_table is not None
        assert cu_seqlens_k.dtype == torch.int32
        used = cu_seqlens_k.diff().tolist()
        return dense_by_arguments(q, k, v, cu_seqlens_q, used, block_table, max_seqlen_q, max_seqlen_k)

    package: Any = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    check(make_attention("flash_attn", "cuda"), Case(MIXED))


def test_varlen_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert options["window_size"] == (-1, 0), "causal"
        assert options["enable_gqa"]
        assert options["num_splits"] == 1
        used = options["seqused_k"].tolist()
        assert options["cu_seq_k"].diff().tolist() == used
        table, cu_q = options["block_table"], options["cu_seq_q"]
        return dense_by_arguments(q, k, v, cu_q, used, table, options["max_q"], options["max_k"])

    monkeypatch.setattr(varlen_module, "varlen_attn", varlen_attn)
    check(make_attention("varlen", "cuda"), Case(MIXED))


def test_varlen_on_cuda_by_shape() -> None:
    """torch's own operator under fake tensors of device cuda: it takes our arguments and gives our shape."""
    case = Case(MIXED, block_size=256)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            return torch.empty(x.shape, dtype=dtype or x.dtype, device="cuda")

        layout = Layout(
            cu_seqlens_q=fake(case.layout.cu_seqlens_q),
            cu_seqlens_k=fake(case.layout.cu_seqlens_k),
            block_table=fake(case.layout.block_table),
            seqused_k=fake(case.layout.seqused_k),
            write_to=fake(case.layout.write_to),
            max_seqlen_q=case.layout.max_seqlen_q,
            max_seqlen_k=case.layout.max_seqlen_k,
            counts=case.layout.counts,
            used=case.layout.used,
            table=case.layout.table,
        )
        half = torch.bfloat16
        q, k, v = fake(case.queries, half), *(Pages(fake(x.values, half)) for x in (case.k_pages, case.v_pages))
        out = make_attention("varlen", "cuda")(q, k, v, layout)
    assert (out.shape, out.dtype, out.device.type) == (case.queries.shape, half, "cuda")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_the_whole_model_on_cuda_by_shape(
    backend: str, kv_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load and forward with every tensor on a device that this machine need not have."""
    folder = save_tiny(tmp_path)
    package: Any = ModuleType("flash_attn")
    package.__spec__ = ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = lambda q, *_, **__: torch.empty_like(q)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    read = Weights._read

    def read_outside(weights: Weights, name: str, where: tuple[slice, ...]) -> Tensor:
        """Files cannot be read into fake tensors, so that only the shape is taken from them."""
        with unset_fake_temporarily():
            shape = read(Weights(folder, half, torch.device("cpu"), lambda count: None), name, where).shape
        return torch.empty(shape, dtype=half, device=device)

    monkeypatch.setattr(Weights, "_read", read_outside)
    config, device, half = read_config(folder), torch.device("cuda:0"), torch.bfloat16
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*MIXED, strict=True))
    tables = np.arange(len(MIXED), dtype=np.int32)[:, None]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = LlamaModel(folder, config, Ranks(), device, half, 512)
        shard = model.shard
        pages = KvCache(len(model.layers), len(MIXED), 256, shard.kv_heads.size, shard.head_dim, kv_dtype, device)
        layout = make_layout(starts, counts, tables, 256, device)
        total = int(counts.sum())
        tokens, rows = (torch.zeros(n, dtype=torch.int64, device=device) for n in (total, 3))
        logits = model(tokens, tokens, pages, make_attention(backend, "cuda", half, kv_dtype), layout, rows)
    assert (logits.shape, logits.dtype, logits.device.type) == ((3, config.vocab_size), half, "cuda")


def test_backends_are_chosen_by_device() -> None:
    assert make_attention("auto", "cpu").name == "cpu"
    assert make_attention("auto", "cuda").name in ("flash_attn", "varlen")
    for name, device in (("cpu", "cuda"), ("varlen", "cpu"), ("flash_attn", "cpu")):
        with pytest.raises(ValueError, match="does not run on"):
            make_attention(name, device)
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ValueError, match=r"not installed; .* take --attention varlen"):
            make_attention("flash_attn", "cuda")
    check_page_size(512, "cuda")
    check_page_size(7, "cpu")
    with pytest.raises(ValueError, match="take a multiple of 256"):
        check_page_size(16, "cuda")
    with pytest.raises(ValueError, match="unknown attention backend 'magic'"):
        make_attention("magic", "cuda")
