"""Conversion between a user's named arrays and the flat vector: one float32 vector in layout order. Pure.

If servers compute in float64 (``Layout.dtype``), two elements of the vector hold one value, and ``values_of`` shows it.

Invalid input is found here, before anything is sent. The error names the tensor, the given value and the expected one.

Invariants: ``unflatten(layout, flatten(layout, x)) == x`` up to the rounding to the layout's dtype. ``flatten`` copies
nothing if the arrays already are contiguous in memory in layout order. ``unflatten`` and ``views`` share the vector's
memory with the tensors of the layout's dtype that they return.

Not here: routes of slices (``routing``), their encoding (``psdist.compression``).

The values belong to whole tensors. The flat vector is sent in slices, so each slice gets the elements of it that were
written. One digest covers all of them: servers compare it over the workers of a step, whichever slices they hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.errors import (
    DTypeMismatchError,
    InvalidArgumentError,
    LimitExceededError,
    MissingTensorError,
    NonFiniteGradientError,
    ShapeMismatchError,
    UnknownTensorError,
)
from psdist.types import WORDS, DType, Layout, MasterDType, Slicing, TensorSpec, check_tensor_name
from psdist.wire import limits

Flat = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

#: Elements per step of a check: few enough to stay in the cache, and for numpy's dot to start no threads.
_CHUNK_ELEMENTS: Final = 1 << 15
_DTYPE_NAMES: Final[dict[Any, DType]] = {
    np.dtype("f4"): "float32",
    np.dtype("f8"): "float64",
    np.dtype("f2"): "float16",
    NUMPY_DTYPES["bfloat16"]: "bfloat16",
}
#: Magnitudes at which a float32 becomes Inf in the wire's dtype (half way beyond its largest number, ties to even).
OVERFLOW: Final[dict[str, float]] = {
    "float64": float("inf"),
    "float32": float("inf"),
    "float16": 65520.0,
    "bfloat16": float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
}
#: A sum of squares below this excludes elements of that magnitude, for any rounding. For larger elements the sum
#: overflows long before.
_SQUARES: Final[dict[str, float]] = {"float16": 0.99 * 65520.0**2, "bfloat16": float("inf")}
_REMEDY: Final = "use float32 (or float64, float16, bfloat16), for example array.astype('float32')"


def values_of(layout: Layout, flat: Flat) -> NDArray[Any]:
    """Return a view of the vector as values of the layout's dtype; ``Layout.starts`` has the place of each tensor."""
    return flat if layout.dtype == "float32" else flat.view(np.float64)


# --- names, shapes and dtypes -----------------------------------------------------------------------------------------


def layout_of(values: Mapping[str, ArrayLike], dtype: MasterDType = "float32") -> Layout:
    """Return the layout of ``values``, in their order. dtype: see ``Layout``.

    Raises InvalidNameError, DTypeMismatchError for a dtype that is no float, InvalidArgumentError for something that is
    no array, LimitExceededError.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"init must be a dict of arrays by name, not {type(values).__name__}")
    if not values:
        raise InvalidArgumentError("init names no tensor: pass at least one, such as {'w': array}")
    if len(values) > limits.TENSORS_MAX:
        raise LimitExceededError(f"{len(values)} tensors are more than the limit of {limits.TENSORS_MAX}")
    layout = Layout(tuple(_spec_of(name, value) for name, value in values.items()), dtype)
    if layout.total > limits.ELEMENTS_MAX:
        raise LimitExceededError(f"{layout.total} elements are more than the limit of {limits.ELEMENTS_MAX}")
    return layout


def _spec_of(name: str, value: ArrayLike) -> TensorSpec:
    check_tensor_name(name)
    array = as_float(name, value)
    return TensorSpec(name, array.shape, _DTYPE_NAMES[array.dtype.newbyteorder("=")])


def as_float(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return ``value`` as an array of one of the four float dtypes. Raises DTypeMismatchError, InvalidArgumentError."""
    if value is None:
        raise DTypeMismatchError(
            f"tensor {name!r} is None: a gradient is None where the loss does not depend on the tensor. Give zeros, or "
            "leave the tensor out of the parameter set",
            tensor=name,
            given="None",
        )
    try:
        array = value if type(value) is np.ndarray else np.asarray(_without_torch(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"tensor {name!r}: {type(value).__name__} is no array: {error}") from None
    # Other byte orders are rare, and this check costs more than everything else here.
    if array.dtype not in _DTYPE_NAMES and array.dtype.newbyteorder("=") not in _DTYPE_NAMES:
        raise DTypeMismatchError(f"tensor {name!r} has dtype {array.dtype}: {_REMEDY}", tensor=name, given=array.dtype)
    return array


def _without_torch(value: Any) -> Any:
    """Return a torch tensor in a form that numpy can read: without its graph, and bfloat16 as in ml_dtypes.

    Other values are returned unchanged. torch need not be installed, so tensors are recognized by their attributes.
    """
    if not hasattr(value, "detach"):
        return value
    value = value.detach()
    if str(value.dtype) != "torch.bfloat16":
        return value
    return np.asarray(value.float()).astype(NUMPY_DTYPES["bfloat16"])


def tensor_names(layout: Layout) -> str:
    """Return the tensors' names for a message, or the first ones of many."""
    return join_names([tensor.name for tensor in layout.tensors])


def check_names(layout: Layout, values: Mapping[str, object]) -> None:
    """Raise UnknownTensorError, MissingTensorError or InvalidArgumentError unless ``values`` has all tensors."""
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"tensors must come as a dict of arrays by name, not {type(values).__name__}")
    missing = None
    for tensor in layout.tensors:
        if tensor.name not in values:
            missing = tensor.name
            break
    if missing is None and len(values) == len(layout.tensors):
        return
    known = {tensor.name for tensor in layout.tensors}
    unknown = [f"{name!r:.100}" for name in values if name not in known]
    if missing is None:
        raise UnknownTensorError(f"tensor {unknown[0]} is unknown: these parameters have {tensor_names(layout)}")
    given = f"; {join_names(unknown, 4)} was given, which they do not have" if unknown else ""
    raise MissingTensorError(f"tensor {missing!r} is missing: give all of {tensor_names(layout)}{given}")


def join_names(names: Sequence[str], shown: int = 8) -> str:
    """Return names for a message, or the first ones of many."""
    left = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {left} more" if left > 0 else "")


def check_shape(tensor: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raise ShapeMismatchError unless ``shape`` is the tensor's."""
    if shape != tensor.shape:
        raise ShapeMismatchError(
            f"tensor {tensor.name!r} has shape {shape}, expected {tensor.shape}",
            tensor=tensor.name,
            given=shape,
            expected=tensor.shape,
        )


# --- to the vector and back -------------------------------------------------------------------------------------------


def flatten(layout: Layout, values: Mapping[str, ArrayLike], into: Flat | None = None) -> Flat:
    """Return the vector of ``values``: shape (layout.total,), float32. Shares their memory if it has the same form.

    into: vector to copy to otherwise; None allocates one.

    Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
    """
    check_names(layout, values)
    arrays = _checked_arrays(layout.tensors, values)
    # Only the caller's own arrays are shared: one made by asarray would be freed when this returns.
    if all(map(is_, arrays, [values[tensor.name] for tensor in layout.tensors])):
        shared = _shared_vector(layout, arrays)
        if shared is not None:
            return shared
    flat: Flat = np.empty(layout.total, np.float32) if into is None else into
    values_there = values_of(layout, flat)
    if any(np.may_share_memory(array, flat) for array in arrays):
        _write(values_there, arrays, layout.starts)
    else:
        with np.errstate(over="ignore"):  # as in _write
            np.concatenate(arrays, axis=None, out=values_there, casting="unsafe")
    return flat


def flatten_some(layout: Layout, numbers: Sequence[int], values: Mapping[str, ArrayLike], into: Flat) -> None:
    """Write the tensors of these numbers to their places in the vector ``into``.

    Raises ShapeMismatchError, DTypeMismatchError and InvalidArgumentError before anything is written.
    """
    arrays = _checked_arrays([layout.tensors[number] for number in numbers], values)
    _write(values_of(layout, into), arrays, [layout.starts[number] for number in numbers])


def _checked_arrays(tensors: Iterable[TensorSpec], values: Mapping[str, ArrayLike]) -> list[NDArray[Any]]:
    arrays: list[NDArray[Any]] = []
    for tensor in tensors:
        value = values[tensor.name]
        if type(value) is np.ndarray and value.dtype in _DTYPE_NAMES and value.shape == tensor.shape:
            arrays.append(value)
            continue
        array = as_float(tensor.name, value)
        check_shape(tensor, array.shape)
        arrays.append(array)
    return arrays


def _write(flat: NDArray[Any], arrays: Sequence[NDArray[Any]], starts: Sequence[int]) -> None:
    """Copy each array to its place.

    Arrays that already are in place are skipped. Arrays elsewhere in ``flat`` are saved before anything is overwritten.
    """
    copies = []
    for array, start in zip(arrays, starts, strict=False):
        place = flat[start : start + array.size].reshape(array.shape)
        if not np.may_share_memory(array, flat):
            copies.append((place, array))
        elif not _is_same_memory(place, array):
            copies.append((place, array.copy()))
    with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes Inf, which non_finite reports
        for place, array in copies:
            place[...] = array


def _is_same_memory(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return (
        one.__array_interface__["data"] == other.__array_interface__["data"]
        and (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
    )  # fmt: skip


def _shared_vector(layout: Layout, arrays: list[NDArray[Any]]) -> Flat | None:
    """Return the arrays' own memory as one vector if it is contiguous and in order; else None.

    The vector keeps only the first array alive: callers keep all of ``arrays`` for as long as they use it.
    """
    base: NDArray[Any] | None = None
    address = 0
    for array, offset in zip(arrays, layout.offsets, strict=False):
        if array.size == 0:
            continue
        if array.dtype != layout.dtype or not array.flags.c_contiguous:
            return None
        here = array.__array_interface__["data"][0]
        if base is None:
            base, address = array, here - 4 * offset
        elif here != address + 4 * offset:
            return None
    if base is None:
        return np.empty(0, np.float32)
    return np.lib.stride_tricks.as_strided(base.reshape(-1).view(np.float32), (layout.total,), (4,))


def split(layout: Layout, flat: Flat) -> Arrays:
    """Return views of the vector by name, in their declared shapes and the layout's dtype."""
    values, bounds = values_of(layout, flat), zip(layout.tensors, layout.starts, layout.starts[1:], strict=False)
    return {tensor.name: values[start:stop].reshape(tensor.shape) for tensor, start, stop in bounds}


def unflatten(layout: Layout, flat: Flat) -> Arrays:
    """Return named arrays in their declared dtypes and shapes. Those of the layout's dtype are views of ``flat``."""
    out = split(layout, flat)
    for tensor in layout.tensors:
        if tensor.dtype != layout.dtype:
            out[tensor.name] = _narrow(out[tensor.name], tensor.dtype)
    return out


def views(layout: Layout, numbers: Iterable[int], flat: Flat, converted: Arrays) -> Arrays:
    """Return read-only arrays of the tensors of these numbers.

    Tensors of the layout's dtype are views of the vector. Others are copied into the arrays of ``converted``, which are
    allocated on first use.
    """
    out: Arrays = {}
    values = values_of(layout, flat)
    for number in numbers:
        tensor = layout.tensors[number]
        array: NDArray[Any] = values[layout.starts[number] : layout.starts[number + 1]].reshape(tensor.shape)
        if tensor.dtype != layout.dtype:
            if tensor.name not in converted:
                converted[tensor.name] = np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
            with np.errstate(over="ignore"):
                np.copyto(converted[tensor.name], array, casting="same_kind")
            array = converted[tensor.name].view()
        array.flags.writeable = False
        out[tensor.name] = array
    return out


def _narrow(array: NDArray[Any], dtype: DType) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return array.astype(NUMPY_DTYPES[dtype])


def check_out(layout: Layout, out: Mapping[str, NDArray[Any]]) -> Flat | None:
    """Check that ``out`` can receive the weights. Returns its memory as one vector if it has that form, else None.

    Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
    """
    check_names(layout, out)
    for tensor in layout.tensors:
        array = out[tensor.name]
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise InvalidArgumentError(f"out[{tensor.name!r}] must be a writable numpy array")
        check_shape(tensor, array.shape)
        if array.dtype != NUMPY_DTYPES[tensor.dtype]:
            raise DTypeMismatchError(f"out[{tensor.name!r}] has dtype {array.dtype}, expected {tensor.dtype}")
    return _shared_vector(layout, [out[tensor.name] for tensor in layout.tensors])


def copy_out(layout: Layout, flat: Flat, out: Mapping[str, NDArray[Any]]) -> None:
    """Write the vector into the arrays of ``out``, which passed ``check_out``."""
    values = values_of(layout, flat)
    with np.errstate(over="ignore"):
        for tensor, start, stop in zip(layout.tensors, layout.starts, layout.starts[1:], strict=False):
            np.copyto(out[tensor.name], values[start:stop].reshape(tensor.shape), casting="same_kind")


# --- gradients that cannot be used ------------------------------------------------------------------------------------


def is_finite(flat: NDArray[Any], dtype: str) -> bool:
    """Return True if every value is finite, also after the cast to ``dtype`` for the wire.

    flat: ``values_of`` the vector.
    """
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), _CHUNK_ELEMENTS):
            chunk = flat[start : start + _CHUNK_ELEMENTS]
            if not _is_surely_finite(chunk, dtype) and not _is_finite_chunk(chunk, dtype):
                return False
    return True


def _is_surely_finite(chunk: NDArray[Any], dtype: str) -> bool:
    """Check by one dot product, several times faster than the exact check. False means unknown.

    NaN or Inf among the factors makes a product that is not finite, and no addition reverts that. A sum of squares is
    at least each of its terms, so it bounds the elements' magnitude too. If there is no bound, the product of the
    chunk's two halves (they share the middle of an odd number) does half the arithmetic.
    """
    if dtype in WORDS:
        half = (len(chunk) + 1) // 2
        return bool(abs(np.dot(chunk[:half], chunk[len(chunk) - half :])) < np.inf)
    return bool(np.dot(chunk, chunk) < _SQUARES[dtype])


def _is_finite_chunk(chunk: NDArray[Any], dtype: str) -> bool:
    limit = OVERFLOW[dtype]
    return bool(chunk.min() > -limit and chunk.max() < limit)  # NaN fails both


def check_initial(layout: Layout, flat: Flat) -> None:
    """Raise InvalidArgumentError, which names the tensor, if initial values are NaN or Inf."""
    values = values_of(layout, flat)
    if is_finite(values, layout.dtype):
        return
    for tensor, start, stop in zip(layout.tensors, layout.starts, layout.starts[1:], strict=False):
        if count := int(np.count_nonzero(~np.isfinite(values[start:stop]))):
            raise InvalidArgumentError(
                f"init {tensor.name!r} holds {count} NaN or Inf of {tensor.size} elements: training cannot begin from "
                "that, so nothing was uploaded",
                tensor=tensor.name,
                count=count,
            )


def non_finite(layout: Layout, flat: Flat, dtype: str, numbers: Iterable[int] | None = None) -> NonFiniteGradientError:
    """Return the error that names the first tensor with NaN or Inf (after the cast to ``dtype``) and counts them.

    numbers: tensors to search, at least one with NaN or Inf; None for all.
    """
    counts = {}
    infinite = has_nan = False
    for number in range(len(layout.tensors)) if numbers is None else numbers:
        part = values_of(layout, flat)[layout.starts[number] : layout.starts[number + 1]]
        if count := int(np.count_nonzero(~(np.abs(part) < OVERFLOW[dtype]))):
            counts[layout.tensors[number]] = count
            infinite = infinite or not bool(np.isfinite(part).all())
            has_nan = has_nan or bool(np.isnan(part).any())
    tensor, count = next(iter(counts.items()))
    total = sum(counts.values())
    cast = f" after the cast to {dtype}"
    if infinite:  # A float64 may have been finite.
        cast = "" if has_nan else f" as float32, whose largest number is {np.finfo(np.float32).max:.2g}"
    more = f" ({total} in all tensors)" if total > count else ""
    return NonFiniteGradientError(
        f"gradient {tensor.name!r} holds {count} NaN or Inf of {tensor.size} elements{cast}{more}: nothing of it was "
        "sent; lower the learning rate, scale the loss, or declare non_finite='skip'",
        tensor=tensor.name,
        count=count,
    )


def grad_norm(flat: NDArray[Any], slice_values: int) -> float:
    """Return the global L2 norm of ``flat``: squares in float64, summed per slice, the sums added in slice order."""
    total = 0.0
    for start in range(0, len(flat), slice_values):
        total += float(np.square(flat[start : start + slice_values], dtype=np.float64).sum())
    return float(np.sqrt(total))


class WrittenRanges(NamedTuple):
    """Written elements of a slice: the start of each range in it, ascending, the sizes, and all values as float32."""

    starts: list[int]
    sizes: list[int]
    values: bytes


class WrittenWeights:
    """Elements of some tensors in the flat vector, by the tensor's number. They do not change."""

    def __init__(self, layout: Layout, values: Mapping[int, Flat]) -> None:
        self._layout = layout
        self._values = dict(sorted(values.items()))
        #: Written ranges of the vector, ascending: neighbouring tensors make one range.
        self._ranges: list[tuple[int, int]] = []
        for number, array in self._values.items():
            start = layout.offsets[number]
            if not array.size:
                continue
            if self._ranges and self._ranges[-1][1] == start:
                start, _ = self._ranges.pop()
            self._ranges.append((start, layout.offsets[number + 1]))

    @classmethod
    def copied(
        cls, layout: Layout, values: Mapping[str, object], earlier: WrittenWeights | None = None
    ) -> WrittenWeights:
        """Return copies of ``values``, over those of ``earlier``. Raises UnknownTensorError, ShapeMismatchError,
        DTypeMismatchError, and InvalidArgumentError for NaN or Inf and for something that is no mapping."""
        if not isinstance(values, Mapping):
            raise InvalidArgumentError(f"tensors must come as a dict of arrays by name, not {type(values).__name__}")
        numbers = {tensor.name: number for number, tensor in enumerate(layout.tensors)}
        found = {} if earlier is None else dict(earlier._values)
        for name, value in values.items():
            if name not in numbers:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {tensor_names(layout)}"
                )
            array = as_float(name, value)  # type: ignore[arg-type]  # it checks the type
            check_shape(layout.tensors[numbers[name]], array.shape)
            with np.errstate(over="ignore"):  # a float64 that float32 cannot hold becomes Inf, which is refused
                copy = array.astype(layout.dtype).reshape(-1)
            if not is_finite(copy, layout.dtype):
                raise InvalidArgumentError(
                    f"the values written to tensor {name!r} hold NaN or Inf: training cannot continue from these",
                    tensor=name,
                )
            found[numbers[name]] = copy.view(np.float32)
        return cls(layout, found)

    @property
    def is_empty(self) -> bool:
        """True if no element was written."""
        return not self._ranges

    @cached_property
    def digest(self) -> bytes:
        """Digest of the written tensors and their values (xxh3, 16 bytes)."""
        state = xxhash.xxh3_128()
        for number, array in self._values.items():
            state.update(f"{number}:{array.size};".encode())
            state.update(array.data)
        return state.digest()

    def touches(self, slicing: Slicing, slices: Sequence[int]) -> bool:
        """Return True if any of ``slices`` has written elements."""
        return any(self._within(*slicing.bounds(index)) for index in slices)

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the written ranges within [start, stop)."""
        first = bisect_right(self._ranges, start, key=lambda one: one[1])
        last = bisect_left(self._ranges, stop, first, key=lambda one: one[0])
        return [(max(low, start), min(high, stop)) for low, high in self._ranges[first:last]]

    def in_slice(self, slicing: Slicing, index: int) -> WrittenRanges | None:
        """Return the written elements of a slice; None if there are none."""
        start, stop = slicing.bounds(index)
        ranges = self._within(start, stop)
        if not ranges:
            return None
        values = b"".join(self._bytes(low, high) for low, high in ranges)
        return WrittenRanges([low - start for low, _ in ranges], [high - low for low, high in ranges], values)

    def _bytes(self, start: int, stop: int) -> bytes:
        """Return the values of elements [start, stop) of the vector; all were written."""
        offsets, parts = self._layout.offsets, []
        number = bisect_right(offsets, start) - 1
        while start < stop:
            end = min(stop, offsets[number + 1])
            if end > start:
                parts.append(self._values[number][start - offsets[number] : end - offsets[number]].tobytes())
            start, number = end, number + 1
        return b"".join(parts)
