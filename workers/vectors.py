"""Vector code for a numba kernel, written as LLVM's own instructions.

LLVM's vectoriser turns only innermost loops into vectors, and keeps no block of sums in registers across the loop
around them, which is what makes a product of matrices fast. Here both are said outright. A panel is `PANEL` numbers
side by side, `VECTORS` registers; every array is flat, and where something is in it is said in elements.

That a block of sums stays in registers: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils as _cgutils
from numba.core import types

_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if _WIDE else 8
VECTORS = 3
PANEL = VECTORS * LANES
ROWS = 8 if _WIDE else 4
"""Rows of a block: with VECTORS each they leave a few of the 32 (without AVX-512: 16) registers for what is read."""

LINE = 64
"""Bytes of a cache line."""

cgutils: Any = _cgutils

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_FLOATS: Any = ir.VectorType(_FLOAT, LANES)
_INTS: Any = ir.VectorType(_INT, LANES)

LEAST_POWER = -126.0
"""Of two, that is still a normal float32: what would be smaller is 0."""
TERMS = 7
"""Of the series of 2^x around 0: the next one is below the rounding for |x| <= 1/2."""


class Vectors:
    """Instructions on vectors of LANES numbers, added where the builder is. What is kept over a loop is kept in what
    LLVM turns into registers. Of a panel the first `vectors` are computed with: PANEL apart are panels all the same."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any, *, vectors: int = VECTORS) -> None:
        self._context, self._builder, self._signature, self._arguments = context, builder, signature, arguments
        self._vectors = vectors

    def place(self, argument: int, offset: Any) -> Any:
        """Of an array that is an argument, the address of an element."""
        array = self._context.make_array(self._signature.args[argument])
        return self._builder.gep(array(self._context, self._builder, self._arguments[argument]).data, [offset])

    def number(self, value: int) -> Any:
        return ir.Constant(self._context.get_value_type(types.intp), value)

    def multiply(
        self,
        left: Any,
        panel: Any,
        out: Any,
        *,
        of_row: Any,
        of_step: Any,
        count: Any,
        add: bool,
        rows: int = ROWS,
        of_out: Any = None,
        ahead: Any = None,
        lines: int = 0,
    ) -> None:
        """out[r] = (out[r] +) sum over k < count of left[r * of_row + k * of_step] * panel[k], for `rows` rows r.

        Rows of out are `of_out` apart (None: PANEL). With each k the processor is asked for the next `lines` cache
        lines from `ahead` on.
        """
        builder = self._builder
        of_out = self.number(PANEL) if of_out is None else of_out
        lefts = [builder.gep(left, [builder.mul(of_row, self.number(r))]) for r in range(rows)]
        outs = [builder.gep(out, [builder.mul(of_out, self.number(r))]) for r in range(rows)]
        sums = [self.kept(self.panel(row) if add else [self.all_of(0.0)] * self._vectors) for row in outs]
        with cgutils.for_range(builder, count) as loop:
            for line in range(lines):
                at = builder.add(builder.mul(loop.index, self.number(lines)), self.number(line))
                self.fetch(builder.gep(ahead, [builder.mul(at, self.number(LINE // 4))]))
            step = builder.mul(loop.index, of_step)
            right = self.panel(builder.gep(panel, [builder.mul(loop.index, self.number(PANEL))]))
            for row, kept in zip(lefts, sums, strict=True):
                factor = self._spread(builder.load(builder.gep(row, [step])))
                for vector, x in zip(kept, right, strict=True):
                    builder.store(self.fused(factor, x, builder.load(vector)), vector)
        for row, kept in zip(outs, sums, strict=True):
            self.write_panel([builder.load(vector) for vector in kept], row)

    def fetch(self, place: Any) -> None:
        """Have the cache line of an address read into the cache. Of an address that there is not, nothing comes."""
        address = self._builder.bitcast(place, ir.IntType(8).as_pointer())
        number = [ir.Constant(_INT, value) for value in (0, 3, 1)]  # to read, into the nearest cache, of data
        kind = ir.FunctionType(ir.VoidType(), [address.type, *(x.type for x in number)])
        function = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.prefetch.p0")
        self._builder.call(function, [address, *number])

    def fetch_all(self, place: Any, size: Any) -> None:
        """Have `size` bytes from an address on read into the cache."""
        nothing, line = self.number(0), self.number(LINE)
        first = self._builder.bitcast(place, ir.IntType(8).as_pointer())
        with cgutils.for_range_slice(self._builder, nothing, size, line, inc=True) as (offset, _):
            self.fetch(self._builder.gep(first, [offset]))

    def row(self, argument: int, indices: Any) -> tuple[Any, Any]:
        """Of an array that is an argument, where its last dimension at these indices of the others begins, and the
        bytes that it takes."""
        kind = self._signature.args[argument]
        found = self._context.make_array(kind)(self._context, self._builder, self._arguments[argument])
        strides, shape = (cgutils.unpack_tuple(self._builder, x) for x in (found.strides, found.shape))
        first = self._builder.bitcast(found.data, ir.IntType(8).as_pointer())
        for stride, index in zip(strides, indices, strict=False):
            first = self._builder.gep(first, [self._builder.mul(stride, index)])
        return first, self._builder.mul(shape[-1], strides[-1])

    def each(self, count: Any, panels: Any) -> Any:
        """A loop over so many panels: `with` gives the address of each."""
        return _Each(self._builder, count, panels, self.number(PANEL))

    def panel(self, place: Any) -> list[Any]:
        return [self._builder.load(p, align=4) for p in self._vectors_at(place)]

    def write_panel(self, vectors: list[Any], place: Any) -> None:
        for vector, p in zip(vectors, self._vectors_at(place), strict=True):
            self._builder.store(vector, p, align=4)

    def _vectors_at(self, place: Any) -> list[Any]:
        offsets = (self.number(v * LANES) for v in range(self._vectors))
        return [self._builder.bitcast(self._builder.gep(place, [o]), _FLOATS.as_pointer()) for o in offsets]

    def kept(self, vectors: Any) -> list[Any]:
        return [cgutils.alloca_once_value(self._builder, vector) for vector in vectors]

    def all_of(self, value: float) -> Any:
        return ir.Constant(_FLOATS, [ir.Constant(_FLOAT, value)] * LANES)

    def _spread(self, value: Any) -> Any:
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        first = self._builder.insert_element(nothing, value, ir.Constant(_INT, 0))
        return self._builder.shuffle_vector(first, nothing, ir.Constant(_INTS, [ir.Constant(_INT, 0)] * LANES))

    def larger(self, a: Any, b: Any) -> Any:
        return self._builder.select(self._builder.fcmp_ordered(">", a, b), a, b)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c"""
        return self._call("fma", a, b, c)

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0: 2^t = 2^n 2^(t - n), n the nearest integer."""
        builder = self._builder
        power = builder.fmul(x, self.all_of(math.log2(math.e)))
        counts = builder.fcmp_unordered(">", power, self.all_of(LEAST_POWER))  # and what is no number stays none
        power = builder.select(counts, power, self.all_of(0.0))
        whole = self._call("floor", builder.fadd(power, self.all_of(0.5)))
        part = builder.fsub(power, whole)
        first, *others = (math.log(2) ** k / math.factorial(k) for k in reversed(range(TERMS)))
        result = self.all_of(first)
        for term in others:
            result = self.fused(result, part, self.all_of(term))
        exponent = builder.add(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [ir.Constant(_INT, 127)] * LANES))
        bits = builder.shl(exponent, ir.Constant(_INTS, [ir.Constant(_INT, 23)] * LANES))
        result = builder.fmul(result, builder.bitcast(bits, _FLOATS))
        return builder.select(counts, result, self.all_of(0.0))

    def _call(self, name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
        function = cgutils.get_or_insert_function(self._builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return self._builder.call(function, arguments)


def in_case(builder: Any, value: Any, cases: Iterable[int], build: Callable[[int], None]) -> None:
    """What is built for each of these numbers, of which `value` is known when it runs."""
    for number in cases:
        with builder.if_then(builder.icmp_signed("==", value, ir.Constant(value.type, number))):
            build(number)


class _Each:
    def __init__(self, builder: Any, count: Any, panels: Any, width: Any) -> None:
        self._builder, self._panels, self._width = builder, panels, width
        self._loop = cgutils.for_range(builder, count)

    def __enter__(self) -> Any:
        index = self._loop.__enter__().index
        return self._builder.gep(self._panels, [self._builder.mul(index, self._width)])

    def __exit__(self, *raised: Any) -> None:
        self._loop.__exit__(*raised)
