"""Between a device's memory and the arrays of scripts: CuPy's, torch's and whatever can be exchanged with CuPy.

The only module of the client that uses CuPy's arrays; CuPy is imported when the first device array is given or asked
for.
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
from psdist.compression.gpu.launcher import Launcher
from psdist.compression.gpu.memory import DeviceVector
from psdist.compression.gpu.tables import TILE
from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DTypeMismatchError,
    InvalidArgumentError,
    LimitExceededError,
)
from psdist.gpu.device import Device, current_device, device_number, is_out_of_memory, open_device
from psdist.types import DType

#: CUDA among the devices of DLPack, and CUDA's managed memory.
_DLPACK_CUDA = (2, 13)


class TakenArray(NamedTuple):
    """A script's array, as float32 one after another. owner: what keeps its memory."""

    address: int
    shape: tuple[int, ...]
    owner: object


class DeviceArrays(Protocol):
    """The arrays of one device."""

    device: Device

    def take(self, name: str, value: Any) -> TakenArray:
        """The array of tensor ``name``, copied only where it is not float32 or not contiguous.

        Raises DTypeMismatchError, InvalidArgumentError for an array of another device, DeviceUnavailableError where
        what copies it cannot be compiled.
        """

    def make(self, vector: DeviceVector, start: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """An array of the elements of ``vector`` from ``start`` on: a view of float32, a copy of another dtype."""

    def synchronize(self) -> None:
        """Returns when all that the script has given to the device is done, on any of its streams."""


class CupyArrays:
    """``DeviceArrays`` by CuPy. name: "cuda" or "cuda:N". Raises InvalidArgumentError, DeviceUnavailableError.

    Errors of CUDA are DeviceLostError, and LimitExceededError where memory is used up.
    """

    def __init__(self, name: str) -> None:
        self.device: Device = open_device(name)
        self._cupy = import_module("cupy")
        self._number = device_number(name)
        #: For conversions, of one thread at a time.
        self._converter: Launcher | None = None
        self._lock = Lock()

    @contextmanager
    def _used(self, what: str) -> Iterator[None]:
        """The device is the thread's current one; its errors are ours."""
        runtime = self._cupy.cuda.runtime
        try:
            with current_device(self._cupy, self._number):
                yield
        except (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError, MemoryError) as error:
            if is_out_of_memory(error):
                raise LimitExceededError(
                    f"{self.device.name} has no room for {what} ({error}): end what else uses it, or give arrays "
                    "of float32 that are contiguous, which are not copied"
                ) from None
            raise DeviceLostError(f"{self.device.name}: {what} failed: {error}", device=self.device.name) from error

    @contextmanager
    def _converting(self) -> Iterator[None]:
        """What CuPy compiles a kernel of its own for: that takes CUDA's headers, which its wheel does not have."""
        runtime = self._cupy.cuda.runtime
        try:
            yield
        except (self._cupy.cuda.compiler.CompileException, RuntimeError) as error:
            if isinstance(error, (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)):
                raise
            raise DeviceUnavailableError(
                "CuPy cannot compile what converts arrays that are not float32, or not contiguous. It needs CUDA's "
                f"headers: pip install nvidia-cuda-runtime-cu12, or set CUDA_PATH to a toolkit ({error!s:.2000})",
                missing="headers",
            ) from None

    def take(self, name: str, value: Any) -> TakenArray:
        """As ``DeviceArrays``."""
        if hasattr(value, "detach"):  # A torch tensor, without its graph. torch gives its bfloat16 to nobody.
            value = value.detach()
            _check(name, str(value.dtype).removeprefix("torch."))
            value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        with self._used(f"reading tensor {name!r}"):
            self._check_number(name, self._number_of(value))  # CuPy would copy what lies on another device.
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
        """A contiguous array in another dtype, rounded as by numpy, denormal numbers included."""
        out = self._cupy.empty(array.shape, dtype)
        size = math.prod(array.shape)
        if size:
            self.synchronize()  # The script's work on it.
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
        """As ``DeviceArrays``."""
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
        """As ``DeviceArrays``."""
        with self._used("what was given to it before"):
            self._cupy.cuda.runtime.deviceSynchronize()


def _check(name: str, dtype: str) -> None:
    if dtype not in NUMPY_DTYPES:
        raise DTypeMismatchError(
            f"tensor {name!r} has dtype {dtype}: use float32 (or float64, float16, bfloat16)", tensor=name, given=dtype
        )


@cache
def open_arrays(number: int) -> DeviceArrays:
    """The arrays of device ``number``. Raises DeviceUnavailableError."""
    return CupyArrays(f"cuda:{number}")


def is_on_device(value: object) -> bool:
    """Whether a script's array lies on a CUDA device. CuPy need not be installed."""
    if type(value) is np.ndarray:
        return False
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _DLPACK_CUDA
    return hasattr(value, "__cuda_array_interface__")


def number_of(value: Any) -> int:
    """The number of the device that an array lies on; 0 where it does not say."""
    return int(value.__dlpack_device__()[1]) if hasattr(value, "__dlpack_device__") else 0
