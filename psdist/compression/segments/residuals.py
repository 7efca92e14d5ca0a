"""Addition of the residual of earlier pushes to a gradient before it is encoded."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.compression.casts import INFINITY, check_output, check_vector
from psdist.compression.compiled import FLOAT, IN, OUT, kernel
from psdist.compression.deferred import types

Floats = NDArray[np.float32]

_U = np.uint32
_FLOAT32: Final = np.dtype(np.float32)


def _add_by_numpy(gradient: Floats, residual: Floats, decay: float, out: Floats) -> bool:
    with np.errstate(all="ignore"):
        np.add(gradient, residual * np.float32(decay), out=out)
    return bool(np.isfinite(out).all())


@kernel(IN, IN, FLOAT, OUT, result=types.boolean, interpreted=_add_by_numpy)
def _add(gradient: Any, residual: Any, decay: Any, out: Any) -> Any:
    bad = _U(0)
    for i in range(out.size):
        value = np.float32(gradient[i] + np.float32(residual[i] * decay))
        out[i] = value
        bad |= _U(_U(value.view(np.uint32) & INFINITY) == INFINITY)
    return bad == 0


def add_decayed(gradient: Floats, residual: Floats, decay: float, out: Floats) -> bool:
    """Write ``gradient + decay * residual`` to ``out``. Return True if all of it is finite.

    All arrays are float32[n], contiguous. ``out`` may be one of the other two.
    """
    check_vector("gradient", gradient, _FLOAT32, out.size)
    check_vector("residual", residual, _FLOAT32, out.size)
    check_vector("out", out, _FLOAT32, out.size)
    check_output("out", out)
    return bool(_add(gradient, residual, decay, out))


#: Kernels of this module.
KERNELS: Final = (_add,)
