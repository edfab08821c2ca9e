"""The closed forms against numbers worked by hand, and the properties every prediction must have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.hardware import GPUS, gpu
from scheduler.roofline import (
    Features,
    Roofline,
    flops,
    intensity,
    moved_bytes,
    roofline_chunk,
    smooth_max,
)
from scheduler.shapes import CONFIGS, known_shape, shape_from_config

A100, H100 = gpu("a100-80").hardware, gpu("h100").hardware
ROUND = replace(A100, memory_fraction=0.72, compute_fraction=0.71, norm=3.0)
"""With fractions that are easy to work with by hand."""


def test_ridges_by_hand() -> None:
    """312e12 / 2.039e12 = 153.016...; 989e12 / 3.35e12 = 295.22..."""
    assert A100.ridge == pytest.approx(153.0162, abs=1e-3)
    assert H100.ridge == pytest.approx(295.2239, abs=1e-3)


def test_parameters_by_hand() -> None:
    """Qwen3-0.6B: a layer has 1024 x 128 x (32 + 16) = 6,291,456 in attention and 3 x 1024 x 3072 = 9,437,184 in the
    MLP; 28 of them are 440,401,920; the tied head adds 151,936 x 1,024 = 155,582,464, the norms 58,368."""
    assert known_shape("Qwen3-0.6B").parameters == 440_401_920 + 155_582_464 + 58_368
    # Llama-3.1-8B has 8,030,261,248 parameters, of which an untied embedding table of 525,336,576 is only looked up.
    assert known_shape("Llama-3.1-8B").parameters == 8_030_261_248 - 525_336_576
    # Llama-3.1-70B has 70,553,706,496, with a table of 1,050,673,152.
    assert known_shape("Llama-3.1-70B").parameters == 70_553_706_496 - 1_050_673_152


@pytest.mark.parametrize(
    ("model", "kv_bytes"),
    [("Qwen3-0.6B", 2 * 28 * 8 * 128 * 2), ("Llama-3.1-8B", 131_072), ("Llama-3.1-70B", 327_680)],
)
def test_kv_bytes_per_token_by_hand(model: str, kv_bytes: int) -> None:
    assert known_shape(model).kv_bytes_per_token == kv_bytes


def test_the_roofline_chunk_by_hand() -> None:
    """With s = 2 and no decodes c* = I*: 153.0 on A100, 295.2 on H100, whatever the model. 32 decodes of 4,096 tokens
    of Llama-3.1-8B read 131,072 x 4,096 x 32 = 17.18e9 bytes beside 15.01e9 of weights: I*/(2 Psi) x 32.19e9 - 32."""
    for model in ("Qwen3-0.6B", "Llama-3.1-8B", "Llama-3.1-70B"):
        assert roofline_chunk(known_shape(model), A100, 0, 0) == pytest.approx(153.016, abs=1e-2)
        assert roofline_chunk(known_shape(model), H100, 0, 0) == pytest.approx(295.224, abs=1e-2)
    eight = known_shape("Llama-3.1-8B")
    by_hand = 153.0162 / (2 * 7_504_924_672) * (2 * 7_504_924_672 + 17_179_869_184) - 32
    assert roofline_chunk(eight, A100, 32, 4096) == pytest.approx(by_hand, rel=1e-4)
    assert by_hand == pytest.approx(296.15, abs=0.1)
    assert roofline_chunk(eight, A100, 400, 0) == 0.0, "400 short decodes are past the ridge alone"


def test_flops_and_bytes_by_hand() -> None:
    """Llama-3.1-8B, a chunk of 512 from position 1,024 and 8 decodes of 2,000: 2 x 520 x Psi and 4 x 32 x 4,096 x
    (512 x 1,024 + 512 x 513 / 2 + 16,000) FLOP; 2 Psi and 131,072 x (16,000 + 1,536) bytes."""
    shape = known_shape("Llama-3.1-8B")
    f = Features(decodes=8, decode_context=16_000).with_chunk(1024, 512)
    pairs = 512 * 1024 + 512 * 513 // 2 + 16_000
    assert f.chunk_pairs == 512 * 1024 + 131_328
    assert flops(shape, f) == 2 * 520 * 7_504_924_672 + 4 * 32 * 4096 * pairs
    assert moved_bytes(shape, f) == 2 * 7_504_924_672 + 131_072 * 17_536
    assert intensity(shape, f) == flops(shape, f) / moved_bytes(shape, f)


def test_the_law_of_a_linear_layer_by_hand() -> None:
    """One token of Llama-3.1-8B on A100-80: 15.01e9 B / (2.039e12 x 0.72) = 10.224 ms of reading and 2 Psi / (312e12 x
    0.71) = 0.0678 ms of computing. 1,024 tokens: 69.39 ms of computing; (10.224^3 + 69.39^3)^(1/3) = 69.46 ms."""
    model = Roofline(known_shape("Llama-3.1-8B"), ROUND)
    assert model.terms(Features(decodes=1)).linear_s == pytest.approx(10.224e-3, rel=1e-3)
    assert model.terms(Features(prefill_tokens=1024)).linear_s == pytest.approx(69.46e-3, rel=1e-3)
    terms = model.terms(Features(decodes=8, decode_context=16_000).with_chunk(0, 512))
    assert terms.elementwise_s == pytest.approx(0.1 * terms.linear_s)
    assert terms.communication_s == 0
    assert terms.total_s == model.predict(Features(decodes=8, decode_context=16_000).with_chunk(0, 512))


def test_attention_by_hand() -> None:
    """Llama-3.1-8B, a chunk of 512 from 1,024 on: 512 x 1,024 + 512 x 513 / 2 pairs, (0.9 - 0.5) x 512^2 in vain and
    512 x 100 for starting each query, 4 x 32 x 4,096 FLOP a pair at half of 312e12; 8 decodes of 2,000 read 131,072 x
    16,000 bytes at 0.72 of 2.039e12. Each of 32 layers has four matrix kernels of 6 us, two of attention of 15 us."""
    hardware = replace(ROUND, attention_fraction=0.5, attention_diagonal=0.9, attention_keys=100)
    terms = Roofline(known_shape("Llama-3.1-8B"), hardware).terms(
        Features(decodes=8, decode_context=16_000).with_chunk(1024, 512)
    )
    pairs = 512 * 1024 + 131_328 + 0.4 * 512**2 + 512 * 100
    assert terms.attention_s == pytest.approx(524_288 * pairs / 156e12 + 131_072 * 16_000 / (0.72 * 2.039e12))
    assert terms.latency_s == pytest.approx(32 * (4 * 6e-6 + 2 * 15e-6))


@pytest.mark.parametrize(
    ("streams", "tp", "factor"),
    [
        (27, 1, 1.0),
        (28, 1, 1 + 0.25 * (432 / 224 - 1)),
        (54, 1, 1.0),
        (28, 2, 1.0),
        (60, 2, 1 + 0.25 * (432 / 240 - 1)),
    ],
)
def test_the_waves_of_attention_by_hand(streams: int, tp: int, factor: float) -> None:
    """An A100's 108 processors hold 216 blocks of threads, a block for each stream and KV head, of which Llama-3.1-8B
    has 8: the first wave is full with 27 streams, and 28 take a second one, half of which is idle."""
    shape, f = known_shape("Llama-3.1-8B"), Features(decodes=streams, decode_context=streams * 2000)
    waving, plain = Roofline(shape, A100, tp), Roofline(shape, replace(A100, attention_waves=0.0), tp)
    assert A100.attention_waves == 0.25
    assert waving.terms(f).attention_s == pytest.approx(factor * plain.terms(f).attention_s)
    assert plain.terms(f).attention_s == pytest.approx(131_072 / tp * streams * 2000 / (0.8 * 2.039e12))
    assert Roofline(shape, H100).terms(f) == Roofline(shape, replace(H100, processors=132)).terms(f), "not profiled"


def test_257_tokens_cost_a_third_more_than_256() -> None:
    """The tile effect that Sarathi-Serve reports (32 %): 257 tokens fill three tiles of 128."""
    model = Roofline(known_shape("Mistral-7B"), A100)
    ratio = model.predict(Features().with_chunk(0, 257)) / model.predict(Features().with_chunk(0, 256))
    assert 1.2 < ratio < 1.5


def test_tensor_parallel_divides_the_work_and_adds_communication() -> None:
    shape = known_shape("Llama-3.1-70B")
    f = Features(decodes=8, decode_context=16_000).with_chunk(0, 512)
    one, four = Roofline(shape, H100).terms(f), Roofline(shape, H100, tp=4).terms(f)
    assert four.linear_s == pytest.approx(one.linear_s / 4)
    assert four.attention_s == pytest.approx(one.attention_s / 4)
    # 160 all-reduces of 520 x 8,192 x 2 bytes: 1.5 times that over 348 GB/s each, and 10 us.
    assert four.communication_s == pytest.approx(160 * (10e-6 + 1.5 * 520 * 8192 * 2 / 348e9))


counts = st.integers(0, 3000)


@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from(sorted(GPUS)), counts, counts, counts, counts)
def test_more_work_never_takes_less_time(
    model: str, name: str, start: int, chunk: int, decodes: int, context: int
) -> None:
    roofline = Roofline(known_shape(model), gpu(name).hardware)
    f = Features(decodes=decodes, decode_context=decodes * context).with_chunk(start, chunk)
    more = [
        f.with_chunk(start + chunk, 1),
        f._replace(decodes=decodes + 1, decode_context=(decodes + 1) * context),
        f._replace(decode_context=f.decode_context + 1),
    ]
    assert all(roofline.predict(g) >= roofline.predict(f) for g in more)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 8))
def test_the_smooth_maximum_lies_between_maximum_and_sum(a: float, b: float, p: float) -> None:
    value = smooth_max(a, b, p)
    assert max(a, b) * (1 - 1e-9) <= value <= (a + b) * (1 + 1e-9)


def test_names() -> None:
    assert known_shape("meta-llama/Llama-3.1-8B-Instruct").name == "Llama-3.1-8B"
    assert gpu("A100").hardware.name == "A100-80"
    assert gpu("RTX 4090").hardware.name == "RTX 4090"
    with pytest.raises(ValueError, match="known: SmolLM2-135M"):
        known_shape("gpt-9")
    with pytest.raises(ValueError, match="known: a100-40"):
        gpu("abacus")
    with pytest.raises(ValueError, match="mixture of experts"):
        shape_from_config("moe", {**CONFIGS["Mistral-7B"], "num_local_experts": 8})
    with pytest.raises(ValueError, match="hidden_size"):
        shape_from_config("none", {})


@given(
    st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 5000), st.integers(0, 9000), st.sampled_from([1, 2, 8])
)
def test_an_iteration_takes_what_its_terms_do(decodes: int, context: int, start: int, chunk: int, tp: int) -> None:
    model = Roofline(known_shape("Llama-3.1-8B"), A100, tp)
    f = Features(decodes=decodes, decode_context=context if decodes else 0)
    f = f.with_chunk(start, chunk) if chunk else f
    assert model.predict(f) == pytest.approx(model.terms(f).total_s, rel=1e-12)
