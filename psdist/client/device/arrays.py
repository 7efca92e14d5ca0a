"""Exchange between a device's memory and the arrays of scripts: CuPy's, torch's, and others that CuPy can import.

This is the only module of the client that uses CuPy's arrays. CuPy is imported when the first device array is passed or
requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np

from psdist.compression.dtypes import NUMPY_DTYPES
from psdist.device.coders import TILE
from psdist.device.device import Device, current_device, device_number, is_out_of_memory, open_device
from psdist.device.memory import DeviceVector, Launcher
from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DTypeMismatchError,
    InvalidArgumentError,
    LimitExceededError,
)
from psdist.types import DType

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
