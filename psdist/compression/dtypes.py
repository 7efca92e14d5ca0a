"""numpy dtypes of payloads, and checks of arrays. Pure."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.errors import DTypeMismatchError, InvalidArgumentError, ShapeMismatchError

AnyArray = NDArray[Any]

#: numpy dtype for each dtype that a payload may hold.
NUMPY_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("<f8"),
}


def check_vector(name: str, array: AnyArray, dtype: np.dtype[Any], size: int) -> None:
    """Raise DTypeMismatchError or ShapeMismatchError unless ``array`` is a contiguous dtype[size]."""
    if array.dtype != dtype:
        raise DTypeMismatchError(f"{name} has dtype {array.dtype}, not {dtype}", dtype=array.dtype)
    if array.ndim != 1 or array.size != size or not array.flags.c_contiguous:
        raise ShapeMismatchError(f"{name} has shape {array.shape}, not a contiguous ({size},)", shape=array.shape)


def check_output(name: str, array: AnyArray) -> None:
    """Raise InvalidArgumentError unless a kernel can write to ``array``."""
    if not array.flags.carray:
        raise InvalidArgumentError(f"{name} cannot be written to: it must be writable, aligned and contiguous")
