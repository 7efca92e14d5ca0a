"""Casts of 16-bit payloads in the client: by numpy until the kernels of ``casts`` are compiled, with the same bytes.

The client does not call ``casts`` directly: the first call of its kernels would compile them, and heartbeats would be
missed meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def narrow(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Write float32[n] ``values`` to float16[n] or bfloat16[n] ``out``, rounded to nearest, ties to even."""
    _casts().narrow(values, out)


def widen(values: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Write float16[n] or bfloat16[n] ``values`` to float32[n] ``out``, exactly."""
    _casts().widen(values, out)


@cache
def _casts() -> Any:
    """Import ``casts`` at first use: a client that casts nothing does not need it."""
    from psdist.compression import casts
    from psdist.compression.background_compiler import shared_compiler

    shared_compiler().add(casts.KERNELS, "16-bit payloads")
    return casts
