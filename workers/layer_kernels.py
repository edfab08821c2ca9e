"""What a layer does before and after its attention, each as one kernel that calls the others: between them is no time
in which threads that wait for the next go to sleep.

Each calls the same kernels as a layer by itself (`workers/layer.py`), so that the numbers are the same.
"""

from __future__ import annotations

from typing import Any

import numba

from workers.elementwise import ALONE, add_and_norm_kernel, gated_kernel, turn_and_keep_kernel
from workers.packed import multiply_kernel

_norm_alone, _norm_together = add_and_norm_kernel.both
_gate_alone, _gate_together = gated_kernel.both
_turn_alone, _turn_together = turn_and_keep_kernel.both


@numba.njit(cache=True)
def project(x: Any, panels: Any, bias: Any, most: Any, out: Any) -> None:
    """out = x W^T + bias, of which there may be none. `most` rows are a task."""
    multiply_kernel(x, panels, out, most)
    if len(bias):
        out += bias


@numba.njit(cache=True)
def _norm(x: Any, more: Any, weight: Any, eps: Any, out: Any) -> None:
    if x.size <= ALONE:
        _norm_alone(x, more, True, weight, eps, out)
    else:
        _norm_together(x, more, True, weight, eps, out)


@numba.njit(cache=True)
def before_attention(
    x: Any,
    more: Any,
    norm: Any,
    eps: Any,
    normed: Any,
    qkv_panels: Any,
    qkv_bias: Any,
    most: Any,
    qkv: Any,
    by_head: Any,
    cos: Any,
    sin: Any,
    qk_norm: Any,
    places: Any,
    q: Any,
    keys: Any,
    values: Any,
) -> None:
    """x += more; q, and in their places keys and values, of what x is then."""
    _norm(x, more, norm, eps, normed)
    project(normed, qkv_panels, qkv_bias, most, qkv)
    if by_head.size <= ALONE:
        _turn_alone(by_head, cos, sin, qk_norm, eps, places, q, keys, values)
    else:
        _turn_together(by_head, cos, sin, qk_norm, eps, places, q, keys, values)


@numba.njit(cache=True)
def feed_forward(
    x: Any,
    more: Any,
    norm: Any,
    eps: Any,
    normed: Any,
    gate_up_panels: Any,
    gate_up_bias: Any,
    down_panels: Any,
    down_bias: Any,
    most: Any,
    gate_up: Any,
    gated: Any,
) -> None:
    """x += more; more becomes what has still to be added to it."""
    _norm(x, more, norm, eps, normed)
    project(normed, gate_up_panels, gate_up_bias, most, gate_up)
    if gated.size <= ALONE:
        _gate_alone(gate_up, gated)
    else:
        _gate_together(gate_up, gated)
    project(gated, down_panels, down_bias, most, more)


@numba.njit(cache=True)
def after_attention(attended: Any, panels: Any, bias: Any, most: Any, more: Any, *inner: Any) -> None:
    """All that follows attention, where no other rank has a part of it; `inner` is what `feed_forward` takes."""
    project(attended, panels, bias, most, more)
    feed_forward(*inner)
