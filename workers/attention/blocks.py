"""The steps of an attention of panels of queries, as LLVM's vector instructions.

Of a panel that is not full only so many vectors are computed with as have queries in them (`wide`).
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from workers.vectors import VECTORS, Vectors, in_case

WIDTHS = range(1, VECTORS + 1)


def _scores_block(
    typing: Any,
    rows: Any,
    at_row: Any,
    stride: Any,
    panel: Any,
    at_panel: Any,
    count: Any,
    out: Any,
    at_out: Any,
    wide: Any,
) -> Any:
    """out[r] = sum over k < count of rows[r, k] * panel[k], for ROWS rows r that are `stride` apart.

    panel [count, PANEL], out [ROWS, PANEL].
    """
    n = types.intp
    signature = types.void(rows, n, n, panel, n, n, out, n, n)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, at_row, stride, _, at_panel, count, _, at_out, wide = arguments

        def with_so_many(some: int) -> None:
            vectors = Vectors(context, builder, signature, arguments, vectors=some)
            places = vectors.place(0, at_row), vectors.place(3, at_panel), vectors.place(6, at_out)
            vectors.multiply(*places, of_row=stride, of_step=vectors.number(1), count=count, add=False)

        in_case(builder, wide, WIDTHS, with_so_many)
        return context.get_dummy_value()

    return signature, build


def _values_block(
    typing: Any, columns: Any, at_column: Any, stride: Any, panel: Any, count: Any, out: Any, at_out: Any, wide: Any
) -> Any:
    """out[c] += sum over k < count of columns[k, c] * panel[k], for ROWS columns c; the rows are `stride` apart.

    panel [count, PANEL] from its beginning, out [ROWS, PANEL].
    """
    n = types.intp
    signature = types.void(columns, n, n, panel, n, out, n, n)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, at_column, stride, _, count, _, at_out, wide = arguments

        def with_so_many(some: int) -> None:
            vectors = Vectors(context, builder, signature, arguments, vectors=some)
            places = vectors.place(0, at_column), vectors.place(3, vectors.number(0)), vectors.place(5, at_out)
            vectors.multiply(*places, of_row=vectors.number(1), of_step=stride, count=count, add=True)

        in_case(builder, wide, WIDTHS, with_so_many)
        return context.get_dummy_value()

    return signature, build


def _soften(
    typing: Any,
    scores: Any,
    count: Any,
    tops: Any,
    totals: Any,
    at_top: Any,
    out: Any,
    at_out: Any,
    width: Any,
    wide: Any,
) -> Any:
    """One step of a softmax that comes piece by piece (Milakov and Gimelshein, Online normalizer calculation for
    softmax, 2018): scores [count, PANEL] become exp(score - largest so far of their column). tops and totals [PANEL],
    the largest and the sum of each column so far, and out [width, PANEL], its weighted sum so far, are brought to that.
    """
    n = types.intp
    signature = types.void(scores, n, tops, totals, n, out, n, n, n)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, count, _, _, at_top, _, at_out, width, wide = arguments

        def with_so_many(some: int) -> None:
            vectors = Vectors(context, builder, signature, arguments, vectors=some)
            at = (0, vectors.number(0)), (2, at_top), (3, at_top), (5, at_out)
            _soften_panel(vectors, builder, count, width, *(vectors.place(*place) for place in at))

        in_case(builder, wide, WIDTHS, with_so_many)
        return context.get_dummy_value()

    return signature, build


def _soften_panel(
    vectors: Vectors, builder: Any, count: Any, width: Any, scores: Any, tops: Any, totals: Any, out: Any
) -> None:
    old = vectors.panel(tops)
    new = vectors.kept(old)
    with vectors.each(count, scores) as row:
        for vector, score in zip(new, vectors.panel(row), strict=True):
            builder.store(vectors.larger(score, builder.load(vector)), vector)
    top = [builder.load(vector) for vector in new]
    shrunk = [vectors.exp(builder.fsub(before, after)) for before, after in zip(old, top, strict=True)]
    total = vectors.kept(builder.fmul(s, t) for s, t in zip(shrunk, vectors.panel(totals), strict=True))
    with vectors.each(count, scores) as row:
        weights = [vectors.exp(builder.fsub(s, t)) for s, t in zip(vectors.panel(row), top, strict=True)]
        vectors.write_panel(weights, row)
        for vector, weight in zip(total, weights, strict=True):
            builder.store(builder.fadd(builder.load(vector), weight), vector)
    with vectors.each(width, out) as row:
        vectors.write_panel([builder.fmul(x, s) for x, s in zip(vectors.panel(row), shrunk, strict=True)], row)
    vectors.write_panel(top, tops)
    vectors.write_panel([builder.load(vector) for vector in total], totals)


scores_block: Any = intrinsic(_scores_block)
values_block: Any = intrinsic(_values_block)
soften: Any = intrinsic(_soften)
