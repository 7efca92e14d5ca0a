"""Gradients and weights in the memory of a CUDA device: its vectors, and exchange with the arrays of scripts.

This is the only module of the client that uses CuPy's arrays. CuPy is imported when the first device array is passed or
requested.

Not here: sending of the gradient (``client.gradients``, ``client.push``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Flat
from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.compression.specifications import Float32, Region
from psdist.device.coders import TILE, CastCoder, SegmentRange, table
from psdist.device.device import Device, current_device, device_number, is_out_of_memory, open_device
from psdist.device.memory import DeviceVector, Launcher, PinnedPool
from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DTypeMismatchError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
)
from psdist.types import DType, Layout, Slicing, TensorSpec

#: DLPack's device types of CUDA and CUDA's managed memory.
_DLPACK_CUDA = (2, 13)


class TakenArray(NamedTuple):
    """A script's array as contiguous float32. owner: keeps its memory alive."""

    address: int
    shape: tuple[int, ...]
    owner: object


class DeviceArrays(Protocol):
    """Arrays of one device."""

    device: Device

    def take(self, name: str, value: Any) -> TakenArray:
        """Return the array of tensor ``name``, copied only if it is not float32 or not contiguous.

        Raises DTypeMismatchError, InvalidArgumentError for an array of another device, DeviceUnavailableError if the
        conversion kernel cannot be compiled.
        """

    def make(self, vector: DeviceVector, start: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return an array of the elements of ``vector`` from ``start`` on: a view if it is float32, else a copy."""

    def synchronize(self) -> None:
        """Return when all work that the script has queued on the device is done, on any stream."""


class CupyArrays:
    """``DeviceArrays`` by CuPy. name: "cuda" or "cuda:N". Raises InvalidArgumentError, DeviceUnavailableError.

    Errors of CUDA become DeviceLostError, or LimitExceededError if memory is exhausted.
    """

    def __init__(self, name: str) -> None:
        self.device: Device = open_device(name)
        self._cupy = import_module("cupy")
        self._number = device_number(name)
        #: Launcher of conversions, used by one thread at a time.
        self._converter: Launcher | None = None
        self._lock = Lock()

    @contextmanager
    def _used(self, what: str) -> Iterator[None]:
        """Return a context with the device as the thread's current one, which translates CUDA's errors."""
        runtime = self._cupy.cuda.runtime
        try:
            with current_device(self._cupy, self._number):
                yield
        except (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError, MemoryError) as error:
            if is_out_of_memory(error):
                raise LimitExceededError(
                    f"{self.device.name} has no room for {what} ({error}): end other users of its memory, or give "
                    "contiguous float32 arrays, which are not copied"
                ) from None
            raise DeviceLostError(f"{self.device.name}: {what} failed: {error}", device=self.device.name) from error

    @contextmanager
    def _converting(self) -> Iterator[None]:
        """Return a context for kernels that CuPy compiles. That needs CUDA's headers, which CuPy's wheel lacks."""
        runtime = self._cupy.cuda.runtime
        try:
            yield
        except (self._cupy.cuda.compiler.CompileException, RuntimeError) as error:
            if isinstance(error, (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)):
                raise
            raise DeviceUnavailableError(
                "CuPy cannot compile its conversion of arrays that are not float32, or not contiguous. It needs CUDA's "
                f"headers: pip install nvidia-cuda-runtime-cu12, or set CUDA_PATH to a toolkit ({error!s:.2000})",
                missing="headers",
            ) from None

    def take(self, name: str, value: Any) -> TakenArray:
        """See ``DeviceArrays``."""
        if hasattr(value, "detach"):  # A torch tensor, without its graph. torch does not export bfloat16.
            value = value.detach()
            _check(name, str(value.dtype).removeprefix("torch."))
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        with self._used(f"reading tensor {name!r}"):
            self._check_number(name, self._number_of(value))  # CuPy would copy an array of another device.
            is_shared = hasattr(value, "__cuda_array_interface__")
            array = self._cupy.asarray(value) if is_shared else self._cupy.from_dlpack(value)
            _check(name, np.dtype(array.dtype).name)
            is_double = array.dtype == np.float64
            with self._converting():
                taken = self._cupy.ascontiguousarray(array, dtype=np.float64 if is_double else np.float32)
            if is_double:
                taken = self._converted("narrow_doubles", taken, np.float32)
            return TakenArray(taken.data.ptr, tuple(array.shape), taken)

    def _converted(self, kernel: str, array: Any, dtype: type[np.generic]) -> Any:
        """Return a contiguous array in another dtype, rounded as by numpy, denormal numbers included."""
        out = self._cupy.empty(array.shape, dtype)
        size = math.prod(array.shape)
        if size:
            self.synchronize()  # Wait for the script's work on the array.
            with self._lock:
                addresses = np.uint64(array.data.ptr), np.uint64(out.data.ptr)
                self._launcher().launch(kernel, -(-size // TILE), 256, *addresses, np.uint64(size))
                self._launcher().wait()
        return out

    def _launcher(self) -> Launcher:
        if self._converter is None:
            self._converter = Launcher(self.device)
        return self._converter

    def _number_of(self, value: Any) -> int:
        if hasattr(value, "__dlpack_device__"):
            return number_of(value)
        address = value.__cuda_array_interface__["data"][0]
        number: int = self._cupy.cuda.runtime.pointerGetAttributes(address).device if address else self._number
        return number

    def _check_number(self, name: str, number: int) -> None:
        if number != self._number:
            raise InvalidArgumentError(
                f"tensor {name!r} lies on cuda:{number}, others on cuda:{self._number}: give all gradients of a "
                "parameter set on one device"
            )

    def make(self, vector: DeviceVector, start: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """See ``DeviceArrays``."""
        cuda = self._cupy.cuda
        with self._used("making an array"):
            memory = cuda.UnownedMemory(vector.address, 4 * vector.size, vector.owner, self._number)
            array = self._cupy.ndarray(shape, np.float32, cuda.MemoryPointer(memory, 4 * start))
            if dtype == "float32":
                return array
            if dtype == "float64":
                return self._converted("widen_floats", array, np.float64)
            with self._converting():
                return array.astype(NUMPY_DTYPES[dtype])

    def synchronize(self) -> None:
        """See ``DeviceArrays``."""
        with self._used("work that was queued before"):
            self._cupy.cuda.runtime.deviceSynchronize()


def _check(name: str, dtype: str) -> None:
    if dtype not in NUMPY_DTYPES:
        raise DTypeMismatchError(
            f"tensor {name!r} has dtype {dtype}: use float32 (or float64, float16, bfloat16)", tensor=name, given=dtype
        )


@cache
def open_arrays(number: int) -> DeviceArrays:
    """Return the arrays of device ``number``. Raises DeviceUnavailableError."""
    return CupyArrays(f"cuda:{number}")


def is_on_device(value: object) -> bool:
    """Return True if a script's array is on a CUDA device. CuPy need not be installed."""
    if type(value) is np.ndarray:
        return False
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _DLPACK_CUDA
    return hasattr(value, "__cuda_array_interface__")


def number_of(value: Any) -> int:
    """Return the number of an array's device; 0 if the array does not say."""
    return int(value.__dlpack_device__()[1]) if hasattr(value, "__dlpack_device__") else 0


_U32, _U64, _F32 = np.uint32, np.uint64, np.float32


class DeviceVectors:
    """Vectors of ``layout`` on one device. One thread at a time uses them.

    number: number of the device.

    Raises DeviceUnavailableError and DeviceLostError, here and in its methods.
    """

    def __init__(self, layout: Layout, arrays: DeviceArrays, number: int = 0) -> None:
        #: Number of the device.
        self.number = number
        self._layout = layout
        self._arrays = arrays
        self._device = arrays.device
        self._run = Launcher(arrays.device)
        self._pinned = PinnedPool(arrays.device)
        self._gradients: DeviceVector | None = None
        self._buffers: dict[str, Any] = {}
        self._weights: DeviceVector | None = None
        #: Registered memory of the host, and the finalizer that unregisters it.
        self._registered: list[tuple[NDArray[Any], weakref.finalize[[Device, NDArray[Any]], DeviceVectors]]] = []

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> DeviceVector:
        """Vector that collects gradients. Its address does not change until ``release_memory``."""
        if self._gradients is None:
            self._gradients = self._new_vector()
        return self._gradients

    def _new_vector(self) -> DeviceVector:
        vector = DeviceVector.allocate(self._device, self._layout.total, self._run.stream)
        self._run.wait()
        return vector

    def buffers(self) -> dict[str, Any]:
        """Return float32 views of the gradient vector, by tensor name."""
        if not self._buffers:
            bounds = zip(self._layout.tensors, self._layout.offsets, strict=False)
            vector, make = self.gradients, self._arrays.make
            self._buffers = {tensor.name: make(vector, start, tensor.shape, "float32") for tensor, start in bounds}
        return dict(self._buffers)

    def gather(self, gradients: Mapping[str, Any]) -> DeviceVector:
        """Return all gradients as one vector: the caller's own memory if it is contiguous and in order.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, InvalidArgumentError.
        """
        flat_vector.check_names(self._layout, gradients)
        tensors = self._layout.tensors
        taken = self._take(tensors, gradients)
        shared = _shared_address(tensors, taken)
        if shared is not None:
            return DeviceVector(self._device, shared, self._layout.total, taken)
        self._copy(range(len(tensors)), taken)
        return self.gradients

    def gather_some(self, numbers: Sequence[int], gradients: Mapping[str, Any]) -> None:
        """Copy the gradients of these tensors to their places in the vector. Tensors that are not given already are in
        place.

        Raises as ``gather``.
        """
        self.synchronize()
        numbers = [number for number in numbers if self._layout.tensors[number].name in gradients]
        self._copy(numbers, self._take([self._layout.tensors[number] for number in numbers], gradients))

    def _take(self, tensors: Sequence[TensorSpec], gradients: Mapping[str, Any]) -> list[TakenArray | Flat]:
        """Return the arrays of these tensors, on the device or, contiguous, in the host's memory."""
        self.synchronize()
        found: list[TakenArray | Flat] = []
        for tensor in tensors:
            value = gradients[tensor.name]
            if is_on_device(value):
                array = self._arrays.take(tensor.name, value)
                flat_vector.check_shape(tensor, array.shape)
                found.append(array)
            else:
                host = flat_vector.as_float(tensor.name, value)
                flat_vector.check_shape(tensor, host.shape)
                with np.errstate(over="ignore"):  # Becomes Inf, which is checked later.
                    found.append(np.ascontiguousarray(host, np.float32))
        self.synchronize()  # Converted arrays.
        return found

    def synchronize(self) -> None:
        """Return when all work that the script has queued on the device is done, such as computing gradients."""
        self._arrays.synchronize()

    def _copy(self, numbers: Sequence[int], taken: Sequence[TakenArray | Flat]) -> None:
        """Copy arrays to the places of their tensors."""
        segments, addresses, vector = [], [], self.gradients
        for number, array in zip(numbers, taken, strict=True):
            start, stop = self._layout.offsets[number], self._layout.offsets[number + 1]
            if start == stop:
                continue
            if isinstance(array, TakenArray):
                segments.append(_range(start, stop))
                addresses.append(array.address)
            else:
                self._device.copy_in(vector.at(start), array, self._run.stream)
        found = table(segments, [segment.tiles for segment in segments], addresses)
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        self._run.launch("gather", found.tasks, 256, _U64(vector.address), *rows)
        self._run.wait()

    def is_finite(self, vector: DeviceVector, dtype: DType, numbers: Iterable[int] | None = None) -> bool:
        """Return True if all elements are finite, also after the cast to ``dtype`` for the wire.

        numbers: tensors to check; None for all.
        """
        offsets = self._layout.offsets
        bounds = [(0, vector.size)] if numbers is None else [(offsets[one], offsets[one + 1]) for one in numbers]
        segments = [_range(start, stop) for start, stop in bounds if start < stop]
        found = table(segments, [segment.tiles for segment in segments])
        flags = np.zeros(2, np.uint32)  # The flag, and an empty set of reset residuals.
        at = self._run.upload(flags)
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        limit = np.float32(flat_vector.OVERFLOW[dtype]).view(np.uint32)
        self._run.launch(
            *("check_finite", found.tasks, 256, _U64(vector.address), _U64(0), *rows, _U64(at), _U64(at + 4)),
            *(_F32(1.0), _U64(0), _F32(0), limit),
        )
        out = np.empty(1, np.uint32)
        self._run.copy_out(out, at)
        self._run.wait()
        return not out[0]

    # --- to the host and back -----------------------------------------------------------------------------------------

    def copy_out(self, vector: DeviceVector, out: Flat, numbers: Iterable[int] | None = None) -> None:
        """Copy the vector to ``out``, which is equally long. numbers: tensors to copy; None for all."""
        offsets = self._layout.offsets
        bounds = [(0, vector.size)] if numbers is None else [(offsets[one], offsets[one + 1]) for one in numbers]
        for start, stop in bounds:
            self._run.copy_out(out[start:stop], vector.at(start))
        self._run.wait()

    def cast(self, vector: DeviceVector, dtype: DType) -> NDArray[Any]:
        """Return the vector in a dtype of 16 bits, in pinned memory of the host that is reused once it is free."""
        size = NUMPY_DTYPES[dtype].itemsize * vector.size
        out, flags = self._run.scratch(size), self._run.scratch(4)
        segment = _range(0, vector.size)
        found = table([segment], [segment.tiles], [out])
        rows = _U64(self._run.upload(found.rows)), _U64(len(found.rows))
        kind = _U32(CastCoder.KINDS[dtype][0])
        self._run.launch("encode_casts", found.tasks, 256, _U64(vector.address), *rows, _U64(flags), kind)
        taken = self._pinned.take(size)
        self._run.copy_out(taken, out)
        self._run.wait()
        return taken.view(NUMPY_DTYPES[dtype])

    def copy_in(self, numbers: Iterable[int], values: Flat) -> None:
        """Copy tensors of these ``numbers`` from the host's gradient vector ``values`` to the device's."""
        for number in numbers:
            start, stop = self._layout.offsets[number], self._layout.offsets[number + 1]
            if start < stop:
                self._device.copy_in(self.gradients.at(start), values[start:stop], self._run.stream)
        self._run.wait()

    def clear(self, vector: DeviceVector, numbers: Iterable[int]) -> None:
        """Set tensors of these ``numbers`` in a vector of gradients to zeros."""
        for number in numbers:
            start, stop = self._layout.offsets[number], self._layout.offsets[number + 1]
            if start < stop:
                self._device.clear(vector.at(start), 4 * (stop - start), self._run.stream)
        self._run.wait()

    def arrays(self, weights: Flat, *, copy: bool) -> dict[str, Any]:
        """Return the weights on the device, in their declared dtypes and shapes.

        copy: False writes them to memory that each such call reuses.
        """
        vector = self._weights if self._weights is not None and not copy else self._new_vector()
        if not copy:
            self._weights = vector
            self.synchronize()  # The script's queued work on the previous weights reads the same memory.
        vector.write(weights, self._run.stream)
        bounds = zip(self._layout.tensors, self._layout.offsets, strict=False)
        made = {one.name: self._arrays.make(vector, start, one.shape, one.dtype) for one, start in bounds}
        self.synchronize()  # Wait for copies to other dtypes.
        return made

    def register(self, memory: NDArray[Any]) -> None:
        """Let copies to ``memory`` of the host run at full speed, until ``unregister``.

        Its pages must not change until then: copies go to the pages of the registration.
        """
        if not memory.nbytes or any(memory is one for one, _ in self._registered) or not self._device.register(memory):
            return
        # The finalizer keeps the memory alive until it is unregistered.
        ending = weakref.finalize(self, _unregister, self._device, memory)
        ending.atexit = False  # A process's registrations end with it.
        self._registered.append((memory, ending))

    def unregister(self) -> None:
        """Undo all registrations. No copy may be under way."""
        registered, self._registered = self._registered, []
        for _, end in registered:
            end()

    def release_memory(self) -> None:
        """Free all memory. Existing views of the gradient vector stay valid."""
        self.unregister()
        self._buffers = {}
        self._gradients = self._weights = None


def _unregister(device: Device, memory: NDArray[Any]) -> None:
    with suppress(DeviceLostError):  # A lost device copies nothing.
        device.unregister(memory)


def open_vectors(layout: Layout, number: int) -> DeviceVectors:
    """Return the vectors of a handle on device ``number``. Raises DeviceUnavailableError."""
    return DeviceVectors(layout, open_arrays(number), number)


def _range(start: int, stop: int) -> SegmentRange:
    """Elements of the flat vector, as one segment."""
    return SegmentRange(0, Region(start, stop, Float32(), (stop - start,)), 0, stop - start)


def _shared_address(tensors: Sequence[TensorSpec], taken: Sequence[TakenArray | Flat]) -> int | None:
    """Return the first address of the arrays if they are contiguous and in order; else None."""
    first = address = None
    for tensor, array in zip(tensors, taken, strict=True):
        if not tensor.size:
            continue
        if not isinstance(array, TakenArray) or (address is not None and array.address != address):
            return None
        first = array.address if first is None else first
        address = array.address + 4 * tensor.size
    return first


class CastGradient:
    """``EncodedGradient`` of plain elements.

    values: in the wire's dtype, as long as the flat vector.
    """

    #: Payloads are plain elements instead of segments.
    is_raw = True

    def __init__(self, values: NDArray[Any], slicing: Slicing) -> None:
        self._values = values
        self._slicing = slicing

    async def ready(self, index: int) -> None:
        """Return immediately: all slices are ready."""

    def difference(self, slices: Sequence[int]) -> None:
        """Return None: payloads are gradients."""

    def send_whole(self, slices: Sequence[int]) -> None:
        """Raise InternalError: payloads already are whole gradients."""
        raise InternalError("a server takes a gradient for a difference")

    def payload(self, index: int) -> memoryview:
        """Return the payload of a slice."""
        start, stop = self._slicing.bounds(index)
        return self._values[start:stop].view(np.uint8).data

    def decode_into(self, index: int, out: NDArray[Any]) -> None:
        """Write a slice in the form in which a server reads it from shared memory: in its own dtype."""
        start, stop = self._slicing.bounds(index)
        out[...] = self._values[start:stop]
