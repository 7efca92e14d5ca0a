"""Reductions of arrays, in rank order.

16-bit floats are added and multiplied in float32 and rounded once. Other dtypes are reduced in their own arithmetic.
Overflow and NaN are results as others: whatever numpy was told about them, no rank raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.errors import DTypeMismatchError, InvalidArgumentError

Array = NDArray[Any]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_OPS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPS: Final = tuple(_OPS)
#: Names of the dtypes that arrays may have.
DTYPES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_NAMES: Final = {np.dtype(name): name for name in DTYPES}
_KINDS: Final = {"avg": "fc", "min": "biuf", "max": "biuf", "band": "biu", "bor": "biu", "bxor": "biu"}


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return numpy's letter for the kind of a dtype, and "f" for bfloat16, for which numpy has none."""
    return "f" if dtype == BFLOAT16 else dtype.kind


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise DTypeMismatchError for arrays that collectives do not carry."""
    if dtype not in _NAMES:
        raise DTypeMismatchError(f"dtype {dtype!s:.60} cannot be sent: use one of {', '.join(DTYPES)}")


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype that collectives carry. Numpy's ``name`` takes microseconds."""
    return _NAMES[dtype]


def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Raise InvalidArgumentError for an unknown operation, DTypeMismatchError if it has no meaning for ``dtype``."""
    if op not in _OPS:
        raise InvalidArgumentError(f"op={op!r:.60} is unknown: use one of {', '.join(OPS)}")
    if kind_of(dtype) not in _KINDS.get(op, "biufc"):
        raise DTypeMismatchError(f"op={op!r} has no meaning for {dtype.name}: convert the array first")


#: Decorator of functions whose arithmetic neither warns nor raises errors.
QUIET: Final = np.errstate(all="ignore")


@QUIET
def combine(op: str, arrays: Sequence[Array], out: Array) -> None:
    """Reduce ``arrays`` from the first to the last into ``out``.

    arrays: one per rank. ``out`` may be the memory of one of them; the first may be overwritten if it is not that one.
    """
    reduce = _OPS[op]
    if out.dtype in (np.float16, BFLOAT16) and op in ("sum", "avg", "product"):
        total = arrays[0].astype(np.float32)
        for array in arrays[1:]:
            reduce(total, array.astype(np.float32), out=total)
        out[...] = _averaged(op, total, len(arrays))
        return
    # ``out`` may be a later one of the arrays. The first one was received, then, and is overwritten instead.
    last = max((number for number, array in enumerate(arrays) if np.may_share_memory(array, out)), default=0)
    total = arrays[0]
    for number, array in enumerate(arrays[1:], start=2):
        total = reduce(total, array, out=total if number <= last else out)
    if total is not out:
        out[...] = total
    _averaged(op, out, len(arrays))


def _averaged(op: str, total: Array, count: int) -> Array:
    if op == "avg":
        np.true_divide(total, count, out=total)
    return total
