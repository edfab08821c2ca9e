"""What is between a layer's products, in one pass each: residual and norm, rotation and the way into the pages, gate.

On CPU in float32 these are numba kernels: torch takes a pass, and a tensor of its own, for each operation. Everything
else goes the plain way, which the kernels are held equal to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.floats import exp
from workers.kv_cache import Pages
from workers.rope import rotate
from workers.threads import as_many_threads_as_torch

ALONE = 1 << 15
"""Numbers that one thread is through with before another has begun."""


class Kernel:
    """A function over rows, compiled for one thread and for all of them."""

    def __init__(self, function: Callable[..., None]) -> None:
        options: dict[str, Any] = {"fastmath": {"contract", "reassoc", "nsz"}, "cache": True, "error_model": "numpy"}
        assert isinstance(function, FunctionType)
        alone = FunctionType(function.__code__, function.__globals__, function.__name__)
        alone.__qualname__ = f"{function.__qualname__}_alone"  # numba's cache knows functions by this, not by options
        self._alone: Any = numba.njit(**options)(alone)
        self._together: Any = numba.njit(parallel=True, **options)(function)

    @property
    def both(self) -> tuple[Any, Any]:
        """As kernels call it: for one thread, and for all of them."""
        return self._alone, self._together

    def __call__(self, numbers: int, *arguments: Any) -> None:
        """`numbers`: how many the rows have together."""
        if numbers <= ALONE:
            self._alone(*arguments)
        else:
            as_many_threads_as_torch()
            self._together(*arguments)


def add_and_norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds `more` to x [rows, n], in place. Returns x / sqrt(mean of x^2 + eps) * weight, [rows, n]."""
    if not _on_cpu(x):
        if more is not None:
            x.add_(more)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    out = torch.empty_like(x)
    add = more is not None
    add_and_norm_kernel(
        x.numel(), x.numpy(), (x if more is None else more).numpy(), add, weight.numpy(), eps, out.numpy()
    )
    return out


def gated(gate_up: Tensor) -> Tensor:
    """[rows, 2 n] -> silu of the first half times the second, [rows, n]."""
    n = gate_up.shape[1] // 2
    if not _on_cpu(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty(gate_up.shape[0], n)
    gated_kernel(out.numel(), gate_up.numpy(), out.numpy())
    return out


def turn_and_keep(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: Tensor | None,
    eps: float,
    pages: tuple[Pages, Pages],
    places: Tensor,
) -> Tensor:
    """qkv [tokens, H + 2K, D]: queries and keys are normed, where there are `norms` [H + K, D], and turned by their
    angles ([tokens, 1, D / 2] each); keys and values go to their places in the pages. Returns the queries [tokens, H,
    D]. What is in qkv may be gone afterwards.
    """
    keys, values = pages
    tokens, both, d = qkv.shape
    heads = both - 2 * keys.kv_heads
    if not _on_cpu(qkv) or keys.values.dtype != torch.float32:
        qk, v = qkv.split_with_sizes([heads + keys.kv_heads, keys.kv_heads], dim=1)
        if norms is not None:
            qk = F.rms_norm(qk, (d,), None, eps) * norms
        q, k = rotate(qk, *angles).split_with_sizes([heads, keys.kv_heads], dim=1)
        keys.write(places, k)
        values.write(places, v)
        return q
    q = qkv.new_empty(tokens, heads, d)
    cos, sin = (x.squeeze(1).numpy() for x in angles)
    kept = (x.arrays[0].reshape(-1, keys.kv_heads, d) for x in pages)
    given = (NOTHING if norms is None else norms).numpy()
    turn_and_keep_kernel(qkv.numel(), qkv.numpy(), cos, sin, given, eps, places.numpy(), q.numpy(), *kept)
    return q


def prepare() -> None:
    """Compile the kernels (or load them from numba's cache), so that no request has to wait for that."""
    for rows in (1, ALONE):
        x = torch.ones(rows, 4)
        add_and_norm(x, x.clone(), torch.ones(4), 1e-6)
        gated(x)
        pages = Pages(torch.zeros(1, rows, 1, 2)), Pages(torch.zeros(1, rows, 1, 2))
        angles = torch.ones(rows, 1, 1), torch.ones(rows, 1, 1)
        turn_and_keep(torch.ones(rows, 3, 2), angles, None, 1e-6, pages, torch.arange(rows))


NOTHING = torch.empty(0, 0)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()


@Kernel
def add_and_norm_kernel(x: Any, more: Any, add: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, n = x.shape
    for i in numba.prange(rows):
        if add:
            for j in range(n):
                x[i, j] += more[i, j]
        squares = np.float32(0.0)
        for j in range(n):
            squares += x[i, j] * x[i, j]
        factor = np.float32(1.0 / math.sqrt(squares / n + eps))
        for j in range(n):
            out[i, j] = x[i, j] * factor * weight[j]


@Kernel
def gated_kernel(gate_up: Any, out: Any) -> None:
    rows, n = out.shape
    for i in numba.prange(rows):
        gate, up, result = gate_up[i, :n], gate_up[i, n:], out[i]
        for j in range(n):
            result[j] = gate[j] / (np.float32(1.0) + exp(-gate[j])) * up[j]


@Kernel
def turn_and_keep_kernel(
    qkv: Any, cos: Any, sin: Any, norms: Any, eps: Any, places: Any, q: Any, keys: Any, values: Any
) -> None:
    tokens, heads, d = q.shape
    kv_heads, half = keys.shape[1], d // 2
    for i in numba.prange(tokens):
        place = places[i]
        for h in range(heads + kv_heads):
            x = qkv[i, h]
            if len(norms):
                squares = np.float32(0.0)
                for j in range(d):
                    squares += x[j] * x[j]
                factor = np.float32(1.0 / math.sqrt(squares / d + eps))
                for j in range(d):
                    x[j] = x[j] * factor * norms[h, j]
            y = q[i, h] if h < heads else keys[place, h - heads]
            for j in range(half):
                y[j] = x[j] * cos[i, j] - x[half + j] * sin[i, j]
                y[half + j] = x[half + j] * cos[i, j] + x[j] * sin[i, j]
        for h in range(kv_heads):
            values[place, h] = qkv[i, heads + kv_heads + h]
