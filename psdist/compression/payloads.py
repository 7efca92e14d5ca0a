"""Casts of 16-bit payloads on the client: numpy's until those of ``casts`` are compiled, with the same bytes.

Not ``casts`` itself, whose kernels are compiled by their first call: a client must not miss heartbeats.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def narrow(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Writes float32[n] ``values`` to float16[n] or bfloat16[n] ``out``, rounded to nearest, ties to even."""
    _casts().narrow(values, out)


def widen(values: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Writes float16[n] or bfloat16[n] ``values`` to float32[n] ``out``, exactly."""
    _casts().widen(values, out)


@cache
def _casts() -> Any:
    """The module. A client that casts nothing imports none of it."""
    from psdist.compression import casts
    from psdist.compression.background_compiler import of_workers

    of_workers().add(casts.KERNELS, "16-bit payloads")
    return casts
