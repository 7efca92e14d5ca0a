"""Casts between float32 and the 16-bit types of the wire by numpy. Byte-identical to ``casts``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def narrow(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Write float32[n] ``values`` to float16[n] or bfloat16[n] ``out``, rounded to nearest, ties to even."""
    with np.errstate(all="ignore"):  # Non-finite values are checked by the caller, which knows the dtype.
        out[...] = values


def widen(values: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Write float16[n] or bfloat16[n] ``values`` to float32[n] ``out``, exactly."""
    if values.dtype == np.float16:
        out[...] = values
        return
    bits = out.view(np.uint32)
    bits[...] = values.view(np.uint16)
    np.left_shift(bits, 16, out=bits)
