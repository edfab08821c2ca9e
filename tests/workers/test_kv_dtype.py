"""KV in other types than the model's: read back alike by every path, near what was written, and the same tokens
whatever the chunking, the batch or the degree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.conftest import save_tiny
from tests.workers.driver import Driver, driver_on, loaded
from tests.workers.test_attention import dense
from tests.workers.test_parity import WHOLE, prompt_of
from workers.attention import Layout, make_attention, make_layout
from workers.attention.paged_decode import Singles, paged_decode, paged_decode_torch, widened
from workers.attention.widened import WidenedAttention
from workers.kv_cache import KvCache, Pages, bytes_per_block
from workers.kv_dtype import KV_DTYPES, choose_kv_dtype, coded
from workers.worker import Worker

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4
NARROW = ("bfloat16", "float16", "int8")
NEAR = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127, "fp8": 2**-4}
"""The largest error, relative to an element (floats) or to the largest of its head (int8)."""


class Case:
    """Keys and values of several contexts in shuffled pages of a type, and queries of their last tokens."""

    def __init__(self, contexts: list[int], counts: list[int], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(contexts))
        needed = [math.ceil(context / BLOCK) for context in contexts]
        order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        [(self.keys, self.values)] = KvCache(1, len(order), BLOCK, KV_HEADS, DIM, dtype, CPU).layers
        tables = np.zeros((len(contexts), max(needed)), dtype=np.int32)
        self.read: list[tuple[Tensor, Tensor]] = []
        for i, (context, count) in enumerate(zip(contexts, needed, strict=True)):
            tables[i, :count], order = order[:count], order[count:]
            places = torch.tensor(
                [tables[i, p // BLOCK] * BLOCK + p % BLOCK for p in range(context)], dtype=torch.int64
            )
            spread = torch.exp(torch.randn(context, KV_HEADS, 1, generator=generator))  # tokens of different size
            for pages in (self.keys, self.values):
                pages.write(places, torch.randn(context, KV_HEADS, DIM, generator=generator) * spread)
            blocks = torch.from_numpy(tables[i, :count].astype(np.int64))
            k, v = (pages.read(blocks, torch.float32).flatten(0, 1)[:context] for pages in (self.keys, self.values))
            self.read.append((k, v))
        self.q = [torch.randn(count, HEADS, DIM, generator=generator) for count in counts]
        starts = np.array(contexts, dtype=np.int32) - np.array(counts, dtype=np.int32)
        self.layout = make_layout(starts, np.array(counts, dtype=np.int32), tables, BLOCK, CPU)

    def expected(self) -> Tensor:
        """By the definition, over what is read back."""
        return torch.cat([dense(q, k, v) for q, (k, v) in zip(self.q, self.read, strict=True)])


contexts_of = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(contexts_of, st.sampled_from(["float32", *NARROW]))
def test_the_decode_kernel_equals_the_plain_path(contexts: list[int], name: str) -> None:
    case = Case(contexts, [1] * len(contexts), KV_DTYPES[name])
    arguments = (torch.cat(case.q), case.keys, case.values, case.layout.block_table, case.layout.seqused_k)
    plain = paged_decode_torch(*arguments)
    rounding = 2e-5 + 2e-6 * float(plain.abs().max())  # a sum's is that of its largest terms
    out = torch.empty_like(plain)
    singles = Singles(torch.arange(len(contexts)), case.layout.block_table, case.layout.seqused_k)
    paged_decode(arguments[0].numpy(), case.keys, case.values, singles, out.numpy())
    torch.testing.assert_close(out, plain, atol=rounding, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=5), st.sampled_from(NARROW))
def test_chunks_and_decodes_read_the_same(segments: list[tuple[int, int]], name: str) -> None:
    """A chunk's own keys too are read as they were written down."""
    case = Case([start + count for start, count in segments], [count for _, count in segments], KV_DTYPES[name])
    attend = make_attention("cpu", "cpu", kv_dtype=KV_DTYPES[name])
    out = attend(torch.cat(case.q), case.keys, case.values, case.layout)
    torch.testing.assert_close(out, case.expected(), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_finite_number_is_widened_exactly(name: str) -> None:
    """By the kernels' code, and by that in plain Python."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(KV_DTYPES[name])
    every = every[every.float().isfinite()]
    bits, _ = Pages(every.view(-1, 1, 1, 1)).arrays
    kernels = compiled_widened(bits.ravel())
    assert np.array_equal(kernels.view(np.uint32), every.float().numpy().view(np.uint32))
    some = slice(None, None, 97)
    assert np.array_equal([widened(x) for x in bits.ravel()[some]], kernels[some])


@numba.njit
def compiled_widened(elements: NDArray[Any]) -> NDArray[np.float32]:
    out = np.empty(len(elements), dtype=np.float32)
    for i in range(len(elements)):
        out[i] = widened(elements[i])
    return out


@pytest.mark.parametrize("name", KV_DTYPES)
def test_what_is_read_is_near_what_was_written(name: str) -> None:
    rows = (
        torch.randn(40, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-6, 3, 40)[:, None, None]
    )
    rows[7] = 0.0
    [(pages, _)] = KvCache(1, 10, BLOCK, KV_HEADS, DIM, KV_DTYPES[name], CPU).layers
    pages.write(torch.arange(40), rows)
    read = pages.read(torch.arange(10), torch.float32).flatten(0, 1)
    reference = rows.abs().amax(dim=-1, keepdim=True) if name in ("int8", "fp8") else rows.abs()
    smallest = 6e-8 if name == "float16" else 0.0  # below which it has nothing
    assert bool(((read - rows).abs() <= reference * NEAR[name] * 1.001 + smallest).all())
    assert (name == "float32") == bool(torch.equal(read, rows))


def test_a_code_is_final_once_it_is_written() -> None:
    """Later tokens of its block, however large, change nothing of what is read of it."""
    [(pages, _)] = KvCache(1, 1, BLOCK, KV_HEADS, DIM, torch.int8, CPU).layers
    small, large = torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, DIM) * 1e4
    pages.write(torch.tensor([0]), small)
    before = pages.read(torch.tensor([0]), torch.float32)[0, 0].clone()
    pages.write(torch.tensor([1]), large)
    assert torch.equal(pages.read(torch.tensor([0]), torch.float32)[0, 0], before)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.nan, math.inf):
        codes, scales = coded(torch.tensor([[1.0, bad, 2.0]]), torch.int8)
        assert not bool((codes.float() * scales[:, None]).isfinite().all())


class Plain:
    """Stands where a kernel of a GPU does: it takes no other pages than those of the type of its queries."""

    name: ClassVar[str] = "plain"
    reads_as_stored: ClassVar[bool] = True

    def __init__(self) -> None:
        self.pages_read: list[int] = []

    def __call__(self, q: Tensor, k_pages: Pages, v_pages: Pages, layout: Layout) -> Tensor:
        assert k_pages.values.dtype == v_pages.values.dtype == q.dtype
        self.pages_read.append(len(k_pages.values))
        return make_attention("cpu", "cpu")(q, k_pages, v_pages, layout)


@pytest.mark.parametrize("name", ["fp8", "int8", "bfloat16"])
def test_pages_are_widened_for_kernels_that_read_but_their_own_type(name: str) -> None:
    case, kernel = Case([9, 30, 1, 17], [1, 12, 1, 4], KV_DTYPES[name]), Plain()
    attend = WidenedAttention(kernel)
    for _ in range(2):
        out = attend(torch.cat(case.q), case.keys, case.values, case.layout)
        torch.testing.assert_close(out, case.expected(), atol=5e-5, rtol=1e-4)
    assert kernel.pages_read == [3 + 8 + 1 + 5] * 2, "the blocks in use, and no others"


def test_cuda_backends_widen_what_they_cannot_read() -> None:
    half = torch.bfloat16
    assert make_attention("varlen", "cuda", half, half).reads_as_stored
    assert not make_attention("varlen", "cuda", half, torch.int8).reads_as_stored


def test_types_that_cannot_be() -> None:
    assert choose_kv_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    for name, compute, words in (
        ("fp8", torch.float32, "takes a GPU"),
        ("float32", torch.bfloat16, "wider than the bfloat16"),
        ("int4", torch.float32, "unknown KV dtype 'int4'"),
    ):
        with pytest.raises(ValueError, match=words):
            choose_kv_dtype(name, compute, CPU)


def test_bytes_of_a_block() -> None:
    shape = (30, 16, 3, 64)
    assert bytes_per_block(*shape, torch.float32) == 30 * 2 * 16 * 3 * 64 * 4
    assert bytes_per_block(*shape, torch.int8) == 30 * 2 * 16 * 3 * (64 + 4)
    cache = KvCache(*shape[:1], 5, *shape[1:], torch.int8, CPU)
    assert sum(plane.nbytes for plane in cache.planes) == 5 * bytes_per_block(*shape, torch.int8)
    assert all(plane.shape[:3] == (30, 2, 5) for plane in cache.planes)


@pytest.fixture(
    scope="module", params=[name if name == "int8" else pytest.param(name, marks=pytest.mark.slow) for name in NARROW]
)
def narrow(request: pytest.FixtureRequest, smollm2_dir: Path) -> Iterator[Worker]:
    worker = loaded(smollm2_dir, 200, kv_dtype=request.param)
    yield worker
    worker.close()


def test_the_real_models_tokens_whatever_the_chunks_and_the_batch(narrow: Worker) -> None:
    prompt = prompt_of(120)
    alone = driver_on(narrow, 200)
    alone.admit(0, prompt)
    expected = alone.generate(0, 12, WHOLE)
    for chunk in (64, 7):
        driver = driver_on(narrow, 200)
        driver.admit(1, prompt_of(33))
        driver.step({1: 33})
        driver.admit(0, prompt)
        assert driver.generate(0, 12, chunk, along=(1,)) == expected
    again = driver_on(narrow, 200)
    again.admit(0, prompt + expected[:5], prompt=120)  # preempted, and computed again
    assert again.generate(0, 7, 50) == expected[5:]


def test_a_tiny_model_in_int8_is_near_itself_in_float32(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    tokens = []
    for name in ("float32", "int8"):
        worker = loaded(folder, 40, threads=1, kv_dtype=name)
        driver = Driver(worker)
        driver.admit(0, prompt_of(60, 512))
        tokens.append(driver.generate(0, 3, 25))
        assert worker.config.kv_dtype == name
        worker.close()
    assert tokens[0][:1] == tokens[1][:1]
