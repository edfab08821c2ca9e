"""How long an iteration takes in principle: the closed forms of a mixed iteration on a roofline, each term on its own.

Symbols: Psi parameters, s bytes a weight, b decodes of mean context s_bar, c prompt tokens (the chunk), L layers, n_kv
heads of d_head, k bytes a KV element. See Agrawal et al., Sarathi-Serve (OSDI 2024), for the mixed iteration; the
smooth maximum and the achieved fractions are fitted to the operator profiles that Vidur (MLSys 2024) published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that decide the cost. `parameters` counts what a forward multiplies by: every weight but an embedding
    table that is only looked up (of `vocab` rows, which is the output head itself where they are `tied`)."""

    name: str
    parameters: int
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    vocab: int = 0
    tied: bool = True

    @property
    def kv_bytes_per_token(self) -> float:
        """2 L n_kv d_head k: keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def read_bytes(self) -> float:
        """s Psi: the weights, read once an iteration."""
        return self.weight_bytes * self.parameters


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. Rates are peaks per second; `memory_fraction` and `compute_fraction` of them are achieved.

    `norm` is the p of the smooth maximum of the two, `tile` the token granularity of the matrix kernels, `kernel_s`
    what each of those takes beside its work (starting, filling the processors, draining them), `elementwise` the share
    of linear time that norms, rotations and activations add, `link_bytes` the bandwidth between the ranks of a
    tensor-parallel group in one direction, `link_latency_s` the time of an empty all-reduce, `overhead_s` host time an
    iteration that no kernel hides, `memory_bytes` what weights and KV must fit into.

    Attention over chunks achieves `attention_fraction` of peak FLOP/s. Of the chunk's own tokens it computes
    `attention_diagonal` of the square (a half where nothing is computed in vain), and each of its queries costs as
    much as `attention_keys` more keys; an attention kernel takes `attention_s` beside its work. Of the time of decodes'
    attention a share of `attention_waves` goes by whole waves over the `processors` (see `waves`).
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: float
    memory_fraction: float = 0.75
    compute_fraction: float = 0.71
    norm: float = 2.5
    tile: int = 128
    kernel_s: float = 6e-6
    elementwise: float = 0.10
    link_bytes: float = 25e9
    link_latency_s: float = 10e-6
    overhead_s: float = 2e-3
    attention_fraction: float = 0.50
    attention_diagonal: float = 1.14
    attention_keys: float = 714.0
    attention_s: float = 15e-6
    attention_waves: float = 0.0
    processors: int = 0

    @property
    def ridge(self) -> float:
        """I*: FLOP a byte at which compute and memory take the same time."""
        return self.peak_flops / self.bandwidth


class Features(NamedTuple):  # frozen too, and made in half the time: a search for a budget makes a dozen
    """What an iteration's cost depends on, all of it known from its plan.

    `chunk_pairs` are the query-key pairs of the chunks: for a chunk of c tokens from position o, c o + c (c + 1) / 2.
    `chunk_context` are KV positions that the chunks read: their ends, summed over the chunks. `chunk_squares` are the
    squares of the chunks' sizes: kernels compute some of what causality forbids. `chunks` is how many there are.
    """

    prefill_tokens: int = 0
    decodes: int = 0
    decode_context: int = 0
    chunk_pairs: int = 0
    chunk_context: int = 0
    chunk_squares: int = 0
    chunks: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    def with_chunk(self, start: int, count: int) -> Features:
        """The same iteration with one more chunk, of `count` tokens from position `start`."""
        tokens, decodes, decode_context, pairs, context, squares, chunks = self
        pairs += count * start + count * (count + 1) // 2
        context, squares = context + start + count, squares + count * count
        return _made(Features, (tokens + count, decodes, decode_context, pairs, context, squares, chunks + 1))


_made = tuple.__new__


def flops(shape: ModelShape, f: Features) -> float:
    """2 (c + b) Psi + 4 L n_q d_head x pairs: the linear layers, and scores and values of attention."""
    pairs = f.chunk_pairs + f.decode_context
    return 2.0 * f.tokens * shape.parameters + 4.0 * shape.layers * shape.query_heads * shape.head_dim * pairs


def moved_bytes(shape: ModelShape, f: Features) -> float:
    """s Psi + 2 L n_kv d_head k x (decode contexts + chunk contexts)."""
    return shape.read_bytes + shape.kv_bytes_per_token * (f.decode_context + f.chunk_context)


def intensity(shape: ModelShape, f: Features) -> float:
    """I: FLOP a byte of the iteration."""
    return flops(shape, f) / moved_bytes(shape, f)


def roofline_chunk(shape: ModelShape, hardware: Hardware, decodes: int, mean_context: float) -> float:
    """c* = I*/(2 Psi) x (s Psi + 2 L n_kv d_head k s_bar b) - b: the chunk that brings the iteration to the ridge.

    Linear layers only, as in the closed form; at least 0 (the decodes alone may be past the ridge).
    """
    read = shape.read_bytes + shape.kv_bytes_per_token * mean_context * decodes
    return max(0.0, hardware.ridge / (2 * shape.parameters) * read - decodes)


BLOCKS_A_PROCESSOR = 2
"""Of threads, of the attention kernel that was profiled: an A100's time jumps after 216 of them, and it has 108
processors."""


def waves(blocks: float, processors: int, share: float) -> float:
    """By what factor decodes' attention takes longer than the KV that it reads: 1 + share (n B / b - 1), for b blocks
    of threads of which B = 2 x processors run at a time, and n = ceil(b/B) waves of them; 1 up to one wave.

    The kernel has a block of threads for each sequence and KV head, and those of the last wave leave processors idle.
    Wave quantization is described in NVIDIA's "Matrix Multiplication Background User's Guide"; the share is fitted to
    the profiles of Vidur (MLSys 2024). Kernels that divide a long context among idle processors have less of it.
    """
    together = BLOCKS_A_PROCESSOR * processors
    if not share or blocks <= together:
        return 1.0
    return 1.0 + share * (math.ceil(blocks / together) * together / blocks - 1.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """Predicted seconds of an iteration by part. `latency_s` is what its kernels take however little they do."""

    linear_s: float
    attention_s: float
    elementwise_s: float
    communication_s: float
    latency_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        kernels = self.linear_s + self.attention_s + self.elementwise_s + self.latency_s
        return kernels + self.communication_s + self.overhead_s


MATRIX_KERNELS = 4
"""Of a layer: queries, keys and values in one, the attention's output, gate and up in one, down."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The prior cost model: `tp` accelerators of one kind that share a model's layers."""

    shape: ModelShape
    hardware: Hardware
    tp: int = 1
    _laws: _Laws = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_laws", _Laws(self.shape, self.hardware, self.tp))

    def predict(self, f: Features) -> float:
        """Seconds of an iteration."""
        linear, attention, communication, latency = self._laws.seconds(f)
        hw = self.hardware
        return linear + attention + hw.elementwise * linear + latency + communication + hw.overhead_s

    def terms(self, f: Features) -> Terms:
        """The same by part."""
        linear, attention, communication, latency = self._laws.seconds(f)
        return Terms(
            linear_s=linear,
            attention_s=attention,
            elementwise_s=self.hardware.elementwise * linear,
            communication_s=communication,
            latency_s=latency,
            overhead_s=self.hardware.overhead_s,
        )


class _Laws:
    """A roofline's terms in seconds. What follows from the model and the hardware alone is worked out once, linear
    layers once for each number of tokens, and waves once for each number of decodes: budgets, forecasts and simulations
    ask for iterations by the million."""

    def __init__(self, shape: ModelShape, hardware: Hardware, tp: int) -> None:
        hw = hardware
        self._tile, self._norm = hw.tile, hw.norm
        self._memory = shape.read_bytes / tp / (hw.bandwidth * hw.memory_fraction)
        self._compute = 2.0 * shape.parameters / tp / (hw.peak_flops * hw.compute_fraction)
        self._linear: dict[int, float] = {}
        per_pair = 4.0 * shape.layers * shape.query_heads * shape.head_dim / tp
        self._pair = per_pair / (hw.peak_flops * hw.attention_fraction)
        self._square, self._query = hw.attention_diagonal - 0.5, hw.attention_keys
        self._context = shape.kv_bytes_per_token / tp / (hw.bandwidth * hw.memory_fraction)
        self._blocks, self._processors, self._share = shape.kv_heads / tp, hw.processors, hw.attention_waves
        self._one_wave = BLOCKS_A_PROCESSOR * hw.processors / self._blocks if self._share else math.inf  # in decodes
        self._waves: dict[int, float] = {}
        self._matrices = shape.layers * MATRIX_KERNELS * hw.kernel_s
        self._attention_kernel = shape.layers * hw.attention_s
        self._reduce, self._reduce_token = 0.0, 0.0
        if tp > 1:
            self._reduce = 2 * shape.layers * hw.link_latency_s
            a_token = shape.hidden * shape.weight_bytes
            self._reduce_token = 2 * shape.layers * 2 * (tp - 1) / tp * a_token / hw.link_bytes

    def seconds(self, f: Features) -> tuple[float, float, float, float]:
        """Of linear layers, attention, communication, and of starting kernels.

        Attention's chunks are bound by what they compute, decodes by the KV they read, in waves; a kernel for each. A
        layer has two all-reduces, each of 2 (n-1)/n of the activations over the link.
        """
        prompts, decodes, decode_context, pairs, _, squares, _ = f
        tokens = prompts + decodes
        attention, kernels = self._context * decode_context, self._matrices
        if decodes > self._one_wave:
            attention *= self._waves.get(decodes) or self._in_waves(decodes)
        if prompts:
            in_vain = self._square * squares + self._query * prompts
            attention = self._pair * (pairs + in_vain) + attention
            kernels += self._attention_kernel
        if decodes:
            kernels += self._attention_kernel
        padded = tokens if tokens <= self._tile else -(-tokens // self._tile) * self._tile
        linear = self._linear.get(padded) or self._linear_layers(padded)
        return linear, attention, self._reduce + self._reduce_token * tokens, kernels

    def _in_waves(self, decodes: int) -> float:
        """By what factor their attention takes longer than the KV that it reads."""
        self._waves[decodes] = factor = waves(decodes * self._blocks, self._processors, self._share)
        return factor

    def _linear_layers(self, padded: int) -> float:
        """((W/(bw m))^p + (2 Psi ceil(T/tile) tile/(peak f))^p)^(1/p), both halves divided among the ranks.

        Below one tile the kernels are bound by the weights they read, so that the padding of the last tile only counts
        from the second tile on.
        """
        self._linear[padded] = seconds = smooth_max(self._memory, self._compute * padded, self._norm)
        return seconds


def smooth_max(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p), without overflow."""
    high, low = (a, b) if a > b else (b, a)
    return high if low == 0 else high * (1 + (low / high) ** p) ** (1 / p)
