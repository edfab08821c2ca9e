"""x W^T with the rows of W laid side by side in panels, read once and in order: a numba kernel.

A panel is PANEL rows of W, transposed: [in, PANEL]. A block of sums, some rows of x by one panel, stays in registers
while both are gone through, and meanwhile what comes next is fetched: where x has few rows, a product takes about as
long as reading W. Each number of the result is summed up in the order of the inputs, whatever else is computed with it:
a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from workers.threads import as_many_threads_as_torch
from workers.vectors import LINE, PANEL, ROWS, Vectors, in_case

ROWS_OF_TASK = 128
"""Of x, at most."""
NEAR = 32
"""How far ahead of its [in] a panel is fetched that is gone through once: what comes from memory is used before it has
left the processor's first cache."""


class Packed:
    """A matrix [out, in] of float32 on CPU, in panels. The plain one is not kept."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // PANEL)
        self._panels = torch.empty(panels, self.in_features, PANEL)
        whole = self.out_features // PANEL
        self._panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, self.in_features).transpose(1, 2)
        if whole < panels:
            self._panels[whole] = 0.0
            self._panels[whole, :, : self.out_features - whole * PANEL] = weight[whole * PANEL :].T
        self.array: NDArray[np.float32] = self._panels.numpy()

    def multiply(self, x: Tensor) -> Tensor:
        """x [rows, in] -> x W^T, [rows, out]."""
        out = x.new_empty(x.shape[0], self.out_features)
        as_many_threads_as_torch()
        multiply_kernel(x.contiguous().numpy(), self.array, out.numpy(), rows_of_task(len(x)))
        return out

    def rows(self, which: Tensor) -> Tensor:
        """which [n] -> these rows of W, [n, in]."""
        out = torch.empty(len(which), self.in_features)
        as_many_threads_as_torch()
        _rows(self.array, which.numpy(), out.numpy())
        return out


def rows_of_task(rows: int) -> int:
    """As many for each task, in whole blocks: threads get the same number of tasks, and have to end together."""
    tasks = max(1, -(-rows // ROWS_OF_TASK))
    return max(1, -(-rows // (tasks * ROWS))) * ROWS


LINES = -(-PANEL * 4 // LINE)
"""Cache lines of one of a panel's [in]."""
BLOCKS = {rows: range(LINES + 1) if 2 * rows >= ROWS else (LINES,) for rows in range(1, ROWS + 1)}
"""Rows that a block may have, and lines that are then fetched with each of its [in]: fewer rows come alone."""


def _block(
    typing: Any,
    x: Any,
    at_x: Any,
    panels: Any,
    at: Any,
    ahead: Any,
    count: Any,
    out: Any,
    to: Any,
    n: Any,
    rows: Any,
    lines: Any,
) -> Any:
    """out[r] = sum over k < count of x[r, k] * panel[k], for `rows` rows r. Each k has `lines` cache lines fetched."""
    i = types.intp
    signature = types.void(x, i, panels, i, i, i, out, i, i, i, i)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(context, builder, signature, arguments)
        _, at_x, _, at, ahead, count, _, to, of_out, rows, lines = arguments
        places = vectors.place(0, at_x), vectors.place(2, at), vectors.place(6, to)
        next_panel = vectors.place(2, ahead)

        def of(some: int) -> None:
            def fetching(each: int) -> None:
                vectors.multiply(
                    *places, of_row=count, of_step=vectors.number(1), count=count, add=False,
                    rows=some, of_out=of_out, ahead=next_panel, lines=each,
                )  # fmt: skip

            in_case(builder, lines, BLOCKS[some], fetching)

        in_case(builder, rows, BLOCKS, of)
        return context.get_dummy_value()

    return signature, build


_multiply_block: Any = intrinsic(_block)


@numba.njit(inline="never")
def _panel(
    x: Any, at_x: Any, rows: Any, inner: Any, panels: Any, at: Any, ahead: Any, out: Any, to: Any, n: Any
) -> None:
    """Of `rows` rows of x by one panel, in as few blocks as there have to be, all but alike: each goes through the
    whole panel, whatever it has. A single one fetches what it comes to itself; of several the first ones have the panel
    after it, from `ahead` on, fetched, each a part."""
    blocks = -(-rows // ROWS)
    fetching = min(blocks, LINES)
    if blocks == 1:
        ahead = at + NEAR * PANEL
    for b in range(blocks):
        some = rows // blocks + (b < rows % blocks)
        lines = LINES // fetching + (b < LINES % fetching) if b < fetching else 0
        _multiply_block(x, at_x, panels, at, ahead, inner, out, to, n, some, lines)
        at_x += some * inner
        to += some * n
        ahead += lines * inner * (LINE // 4)


def _multiply_panels(x: Any, panels: Any, out: Any, most: Any) -> None:
    (rows, n), (count, inner, _) = out.shape, panels.shape
    parts = -(-rows // most)
    for task in numba.prange(parts * count):
        part, p = task // count, task % count
        first = part * most
        some = min(most, rows - first)
        at, ahead = p * inner * PANEL, min(p + 1, count - 1) * inner * PANEL
        if (p + 1) * PANEL <= n:
            _panel(x, first * inner, some, inner, panels, at, ahead, out, first * n + p * PANEL, n)
        else:
            whole = np.empty((some, PANEL), dtype=np.float32)
            _panel(x, first * inner, some, inner, panels, at, ahead, whole, 0, PANEL)
            for r in range(some):
                for c in range(n - p * PANEL):
                    out[first + r, p * PANEL + c] = whole[r, c]


def _look_up(panels: Any, which: Any, out: Any) -> None:
    for i in numba.prange(len(which)):
        panel, column = panels[which[i] // PANEL], which[i] % PANEL
        for k in range(out.shape[1]):
            out[i, k] = panel[k, column]


multiply_kernel: Any = numba.njit(parallel=True, cache=True)(_multiply_panels)
_rows: Any = numba.njit(parallel=True, cache=True)(_look_up)
