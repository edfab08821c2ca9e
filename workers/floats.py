"""float32 numbers in numba kernels: by their bits, and e to their power."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(numba.float32))

    return numba.float32(numba.uint32), build


float_of_bits: Any = _as_float

_LOG2_E = np.float32(math.log2(math.e))
_SERIES = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
_FAR = np.float32(87.0)
"""e to this, and to its negative, are normal float32 numbers."""


@numba.njit(inline="always")
def exp(x: Any) -> Any:
    """e^x of a float32 within [-FAR, FAR], in operations that LLVM makes vectors of: 2^t = 2^n 2^(t - n). What is no
    number gives none, where the kernel is compiled without `nnan`."""
    near = min(max(x, -_FAR), _FAR)
    t = near * _LOG2_E
    whole = np.floor(t + np.float32(0.5))
    part = t - whole
    y = _SERIES[6]
    y = y * part + _SERIES[5]
    y = y * part + _SERIES[4]
    y = y * part + _SERIES[3]
    y = y * part + _SERIES[2]
    y = y * part + _SERIES[1]
    y = y * part + _SERIES[0]
    return y * float_of_bits(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)) + (x - x)
