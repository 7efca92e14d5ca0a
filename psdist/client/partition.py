"""Between a user's tensors and the flat vector: named arrays to one float32 vector in layout order, and back.

Pure: no waiting, files, clock or randomness. What is wrong with an input is found here, before anything is sent, and
said with the tensor's name, what was given and what is expected. Not here: how the vector is cut and where the slices
go (``routing``), how they are encoded (``psdist.compression``).

Invariants: ``unflatten(layout, flatten(layout, x)) == x`` up to the rounding of float64 to float32; ``flatten`` copies
nothing where the arrays already lie one after another in memory; ``unflatten`` shares the vector's memory with the
float32 tensors it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.compression import NUMPY_DTYPES
from psdist.errors import (
    DTypeMismatchError,
    InvalidArgumentError,
    LimitExceededError,
    MissingTensorError,
    NonFiniteGradientError,
    ShapeMismatchError,
    UnknownTensorError,
)
from psdist.types import DType, Layout, TensorSpec, check_name
from psdist.wire import limits

Flat = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

_CHUNK_ELEMENTS: Final = 1 << 18
_DTYPE_NAMES: Final[dict[Any, DType]] = {
    np.dtype("f4"): "float32",
    np.dtype("f8"): "float64",
    np.dtype("f2"): "float16",
    NUMPY_DTYPES["bfloat16"]: "bfloat16",
}
#: Magnitudes from which a float32 becomes Inf in the wire's dtype (half way beyond its largest number, ties to even).
_OVERFLOW: Final[dict[str, float]] = {
    "float32": float("inf"),
    "float16": 65520.0,
    "bfloat16": float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
}
_REMEDY: Final = "use float32 (or float64, float16, bfloat16), for example array.astype('float32')"


# --- names, shapes and dtypes -----------------------------------------------------------------------------------------


def layout_of(values: Mapping[str, ArrayLike]) -> Layout:
    """The layout of ``values``, in their order.

    Raises InvalidNameError, DTypeMismatchError for a dtype that is no float, InvalidArgumentError for something that is
    no array, LimitExceededError.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"init must be a dict of arrays by name, not {type(values).__name__}")
    if not values:
        raise InvalidArgumentError("init names no tensor: pass at least one, such as {'w': array}")
    if len(values) > limits.TENSORS_MAX:
        raise LimitExceededError(f"{len(values)} tensors are more than the limit of {limits.TENSORS_MAX}")
    layout = Layout(tuple(_spec_of(name, value) for name, value in values.items()))
    if layout.total > limits.ELEMENTS_MAX:
        raise LimitExceededError(f"{layout.total} elements are more than the limit of {limits.ELEMENTS_MAX}")
    return layout


def _spec_of(name: str, value: ArrayLike) -> TensorSpec:
    check_name(name, "tensor name")
    array = _as_float(name, value)
    return TensorSpec(name, array.shape, _DTYPE_NAMES[array.dtype.newbyteorder("=")])


def _as_float(name: str, value: ArrayLike) -> NDArray[Any]:
    """``value`` as an array of one of the four float dtypes."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"tensor {name!r}: {type(value).__name__} is no array: {error}") from None
    if array.dtype.newbyteorder("=") not in _DTYPE_NAMES:
        raise DTypeMismatchError(f"tensor {name!r} has dtype {array.dtype}: {_REMEDY}", tensor=name, given=array.dtype)
    return array


def _check_names(layout: Layout, values: Mapping[str, object]) -> None:
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"tensors must come as a dict of arrays by name, not {type(values).__name__}")
    for tensor in layout.tensors:
        if tensor.name not in values:
            raise MissingTensorError(f"tensor {tensor.name!r} is missing: give all of {_names(layout)}")
    if len(values) > len(layout.tensors):
        known = {tensor.name for tensor in layout.tensors}
        unknown = next(name for name in values if name not in known)
        raise UnknownTensorError(f"tensor {unknown!r:.100} is unknown: these parameters have {_names(layout)}")


def _names(layout: Layout, shown: int = 8) -> str:
    names = ", ".join(tensor.name for tensor in layout.tensors[:shown])
    left = len(layout.tensors) - shown
    return names + (f" and {left} more" if left > 0 else "")


def _check_shape(tensor: TensorSpec, array: NDArray[Any]) -> None:
    if array.shape != tensor.shape:
        raise ShapeMismatchError(
            f"tensor {tensor.name!r} has shape {array.shape}, expected {tensor.shape}",
            tensor=tensor.name,
            given=array.shape,
            expected=tensor.shape,
        )


# --- to the vector and back -------------------------------------------------------------------------------------------


def flatten(layout: Layout, values: Mapping[str, ArrayLike]) -> Flat:
    """The vector of ``values``: shape (layout.total,), float32. No copy where they lie in memory like it.

    Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
    """
    _check_names(layout, values)
    arrays = []
    for tensor in layout.tensors:
        array = _as_float(tensor.name, values[tensor.name])
        _check_shape(tensor, array)
        arrays.append(array)
    # An array that asarray made would be gone when this returns, so only the caller's own are shared.
    if all(array is values[tensor.name] for tensor, array in zip(layout.tensors, arrays, strict=True)):
        shared = _shared_vector(layout, arrays)
        if shared is not None:
            return shared
    flat: Flat = np.empty(layout.total, np.float32)
    with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes Inf, which non_finite reports
        for array, start, stop in zip(arrays, layout.offsets, layout.offsets[1:], strict=False):
            flat[start:stop].reshape(array.shape)[...] = array
    return flat


def _shared_vector(layout: Layout, arrays: list[NDArray[Any]]) -> Flat | None:
    """The arrays' own memory as one vector, if they lie in it in order without gaps; else None.

    It holds all of ``arrays`` alive only through the first: callers keep them for as long as they use it.
    """
    base: NDArray[Any] | None = None
    address = 0
    for array, offset in zip(arrays, layout.offsets, strict=False):
        if array.size == 0:
            continue
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            return None
        here = array.__array_interface__["data"][0]
        if base is None:
            base, address = array, here - 4 * offset
        elif here != address + 4 * offset:
            return None
    if base is None:
        return np.empty(0, np.float32)
    return np.lib.stride_tricks.as_strided(base.reshape(-1), (layout.total,), (4,))


def unflatten(layout: Layout, flat: Flat) -> Arrays:
    """Named arrays in their declared dtypes and shapes; float32 tensors are views of ``flat``."""
    out: Arrays = {}
    for tensor, start, stop in zip(layout.tensors, layout.offsets, layout.offsets[1:], strict=False):
        array = flat[start:stop].reshape(tensor.shape)
        out[tensor.name] = array if tensor.dtype == "float32" else _narrow(array, tensor.dtype)
    return out


def _narrow(array: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return array.astype(NUMPY_DTYPES[dtype])


def check_out(layout: Layout, out: Mapping[str, NDArray[Any]]) -> Flat | None:
    """Checks that ``out`` can take the weights; returns its memory as one vector if it lies like one, else None.

    Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
    """
    _check_names(layout, out)
    for tensor in layout.tensors:
        array = out[tensor.name]
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise InvalidArgumentError(f"out[{tensor.name!r}] must be a writable numpy array")
        _check_shape(tensor, array)
        if array.dtype != NUMPY_DTYPES[tensor.dtype]:
            raise DTypeMismatchError(f"out[{tensor.name!r}] has dtype {array.dtype}, expected {tensor.dtype}")
    return _shared_vector(layout, [out[tensor.name] for tensor in layout.tensors])


def copy_out(layout: Layout, flat: Flat, out: Mapping[str, NDArray[Any]]) -> None:
    """Writes the vector into the arrays of ``out``, which ``check_out`` has let pass."""
    with np.errstate(over="ignore"):
        for tensor, start, stop in zip(layout.tensors, layout.offsets, layout.offsets[1:], strict=False):
            np.copyto(out[tensor.name], flat[start:stop].reshape(tensor.shape), casting="same_kind")


# --- gradients that cannot be used ------------------------------------------------------------------------------------


def is_finite(flat: Flat, dtype: str) -> bool:
    """Whether every element is finite, also after the cast to ``dtype`` for the wire."""
    limit = _OVERFLOW[dtype]
    with np.errstate(invalid="ignore"):
        for start in range(0, len(flat), _CHUNK_ELEMENTS):
            chunk = flat[start : start + _CHUNK_ELEMENTS]
            # The second pass reads from the cache. NaN fails both comparisons.
            if not (chunk.min() > -limit and chunk.max() < limit):
                return False
    return True


def non_finite(layout: Layout, flat: Flat, dtype: str) -> NonFiniteGradientError:
    """The error that names the first tensor with NaN or Inf (after the cast to ``dtype``) and how many there are."""
    bad = ~(np.abs(flat) < _OVERFLOW[dtype])
    total = int(np.count_nonzero(bad))
    number = int(np.searchsorted(layout.offsets, bad.argmax(), side="right")) - 1  # past the empty tensors before it
    tensor = layout.tensors[number]
    count = int(np.count_nonzero(bad[layout.offsets[number] : layout.offsets[number + 1]]))
    cast = "" if np.isnan(flat).any() or np.isinf(flat).any() else f" after the cast to {dtype}"
    more = f" ({total} in all tensors)" if total > count else ""
    return NonFiniteGradientError(
        f"gradient {tensor.name!r} holds {count} NaN or Inf of {tensor.size} elements{cast}{more}: nothing was sent; "
        "lower the learning rate, scale the loss, or declare non_finite='skip'",
        tensor=tensor.name,
        count=count,
    )


def grad_norm(flat: Flat, slice_elements: int) -> float:
    """Global L2 norm of ``flat``: squares in float64, summed per slice, the sums added in slice order."""
    total = 0.0
    for start in range(0, len(flat), slice_elements):
        total += float(np.square(flat[start : start + slice_elements], dtype=np.float64).sum())
    return float(np.sqrt(total))
