"""Scripts' arrays by CuPy, which is a module of the test: calls to it, and refused arrays."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.client import device_vectors as device_arrays
from psdist.client.device_vectors import CupyArrays, is_on_device, number_of
from psdist.device.memory import DeviceVector
from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    DTypeMismatchError,
    InvalidArgumentError,
    LimitExceededError,
)
from tests.support.host_device import HostDevice, needs_compiler


class FakeError(RuntimeError):
    """Error of CUDA. status: its number."""

    def __init__(self, text: str, status: int = 719) -> None:
        super().__init__(text)
        self.status = status


class CompileException(Exception):
    """Error of NVRTC that refuses CuPy's source."""


class FakeArray:
    """CuPy's array with numpy's memory."""

    def __init__(self, values: NDArray[Any], number: int = 0) -> None:
        self.values = values
        self.shape, self.dtype, self.data = values.shape, values.dtype, SimpleNamespace(ptr=values.ctypes.data)
        self.device = SimpleNamespace(id=number)
        self.astype: Any = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.values.__array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id


class FakeTorchTensor:
    """torch's tensor with a graph. Without it, other libraries can use its memory, except for bfloat16."""

    def __init__(self, values: NDArray[Any], dtype: str, *, has_graph: bool = True) -> None:
        self.values, self.dtype, self.has_graph = values, dtype, has_graph

    def detach(self) -> FakeTorchTensor:
        return FakeTorchTensor(self.values, self.dtype, has_graph=False)

    def float(self) -> FakeTorchTensor:
        return FakeTorchTensor(self.values.astype(np.float32), "torch.float32", has_graph=self.has_graph)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.has_graph or self.dtype == "torch.bfloat16":
            raise RuntimeError("no array interface for this tensor")
        return self.values.__array_interface__


class FakeCupy(ModuleType):
    """Part of CuPy that handles arrays.

    current: number of the thread's device.
    failure: raised by every call.
    conversion: error of CuPy's own kernels, if any.
    devices: by address, the device of memory that is not on device 0.
    context: the thread's context.
    """

    def __init__(self) -> None:
        super().__init__("cupy")
        self.current, self.failure, self.synchronized, self.imported = 5, "", 0, 0
        self.conversion: Exception | None = None
        self.devices: dict[int, int] = {}
        self.context = 77
        runtime = SimpleNamespace(
            CUDARuntimeError=FakeError,
            getDevice=lambda: self.current,
            setDevice=lambda number: setattr(self, "current", number),
            deviceSynchronize=self._synchronize,
            pointerGetAttributes=lambda address: SimpleNamespace(device=self.devices.get(address, 0)),
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=FakeError, ctxGetCurrent=lambda: self.context),
            compiler=SimpleNamespace(CompileException=CompileException),
            UnownedMemory=lambda *given: given,
            MemoryPointer=lambda *given: given,
        )

    def _synchronize(self) -> None:
        assert self.current == 0
        if self.failure:
            raise FakeError(self.failure)
        self.synchronized += 1

    def asarray(self, value: Any) -> FakeArray:
        assert self.current == 0
        if isinstance(value, FakeArray):  # CuPy copies arrays of other devices to the current one.
            return value if value.device.id == self.current else FakeArray(value.values.copy(), self.current)
        return FakeArray(np.asarray(SimpleNamespace(__array_interface__=value.__cuda_array_interface__)))

    def from_dlpack(self, value: Any) -> FakeArray:
        assert self.current == 0
        self.imported += 1
        return FakeArray(value.values)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        assert self.current == 0
        return FakeArray(np.empty(shape, dtype))

    def ascontiguousarray(self, array: FakeArray, dtype: Any) -> FakeArray:
        values = np.ascontiguousarray(array.values, dtype)
        return array if values is array.values else self.converted(values)

    def converted(self, values: NDArray[Any]) -> FakeArray:
        """Return the result of a kernel of CuPy."""
        if self.conversion is not None:
            raise self.conversion
        return FakeArray(values)

    def ndarray(self, shape: tuple[int, ...], dtype: Any, pointer: Any) -> FakeArray:
        assert self.current == 0
        (address, size, owner, number), offset = pointer
        assert (address, number) == (owner.values.ctypes.data, 0) and size == owner.values.nbytes
        count = int(np.prod(shape))
        array = FakeArray(owner.values[offset // 4 : offset // 4 + count].reshape(shape).astype(dtype, copy=False))
        array.astype = lambda dtype: self.converted(array.values.astype(dtype))
        return array


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(device_arrays, "open_device", lambda name: SimpleNamespace(name=name))
    return made


def test_an_array_of_float32_is_taken_where_it_lies(cupy: FakeCupy) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    taken = CupyArrays("cuda").take("w", FakeArray(values))
    assert (taken.address, taken.shape) == (values.ctypes.data, (2, 3)) and cupy.current == 5


@pytest.mark.parametrize("values", [np.arange(6, dtype=np.float16), np.arange(12, dtype="f4")[::2]])
def test_other_floats_are_converted(cupy: FakeCupy, values: NDArray[Any]) -> None:
    taken = CupyArrays("cuda").take("w", FakeArray(values))
    assert isinstance(taken.owner, FakeArray) and taken.owner.values.dtype == np.float32
    np.testing.assert_array_equal(taken.owner.values, values)
    assert taken.address == taken.owner.values.ctypes.data != values.ctypes.data


@needs_compiler
def test_float64_is_converted_by_a_kernel_that_keeps_denormal_numbers(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arrays, "open_device", lambda name: HostDevice())
    arrays, cupy.conversion = CupyArrays("cuda"), AssertionError("CuPy's own kernels flush denormal numbers")
    values = np.array([1.0, -0.0, 1e-41, -3e-45, 1e-60, 0.1, np.inf, 3.4e38] * 700)[:5001]
    taken = arrays.take("w", FakeArray(values))
    assert isinstance(taken.owner, FakeArray) and taken.shape == values.shape
    narrowed = values.astype(np.float32)
    assert taken.owner.values.tobytes() == narrowed.tobytes()
    owner = FakeArray(narrowed)
    vector = DeviceVector(arrays.device, owner.data.ptr, narrowed.size, owner)
    made = arrays.make(vector, 1, (5000,), "float64")
    assert made.values.tobytes() == narrowed[1:].astype(np.float64).tobytes()
    assert arrays.take("w", FakeArray(np.zeros((0, 3)))).shape == (0, 3)


def test_a_tensor_of_torch_is_taken_without_its_graph(cupy: FakeCupy) -> None:
    values = np.arange(6, dtype=np.float32)
    assert CupyArrays("cuda").take("w", FakeTorchTensor(values, "torch.float32")).address == values.ctypes.data
    brains = values.astype(ml_dtypes.bfloat16)
    taken = CupyArrays("cuda").take("w", FakeTorchTensor(brains, "torch.bfloat16"))
    np.testing.assert_array_equal(taken.owner.values, values)


def test_what_has_only_dlpack_is_taken_by_that(cupy: FakeCupy) -> None:
    value = SimpleNamespace(values=np.arange(6, dtype=np.float32), __dlpack_device__=lambda: (2, 0))
    assert CupyArrays("cuda").take("w", value).address == value.values.ctypes.data and cupy.imported == 1


def test_what_cannot_be_a_gradient_is_refused(cupy: FakeCupy) -> None:
    with pytest.raises(DTypeMismatchError, match="'w' has dtype int32: use float32"):
        CupyArrays("cuda").take("w", FakeArray(np.arange(6, dtype=np.int32)))
    tensor = FakeTorchTensor(np.zeros(6, np.uint8), "torch.float8_e4m3fn")  # torch provides no array interface for it.
    with pytest.raises(DTypeMismatchError, match="'w' has dtype float8_e4m3fn: use float32"):
        CupyArrays("cuda").take("w", tensor)
    assert cupy.current == 5


def test_arrays_on_another_device_are_refused(cupy: FakeCupy) -> None:
    """Check that they are refused before CuPy copies the array to this device."""
    values = np.zeros(3, np.float32)
    cupy.devices[values.ctypes.data] = 1
    no_dlpack = SimpleNamespace(__cuda_array_interface__=values.__array_interface__)
    for value in (FakeArray(values, number=1), no_dlpack):
        with pytest.raises(InvalidArgumentError, match="'w' lies on cuda:1, others on cuda:0"):
            CupyArrays("cuda").take("w", value)
    del cupy.devices[values.ctypes.data]
    assert CupyArrays("cuda").take("w", no_dlpack).address == values.ctypes.data
    assert cupy.current == 5


def test_arrays_are_views_of_a_vector_or_copies_of_another_dtype(cupy: FakeCupy) -> None:
    owner = FakeArray(np.arange(10, dtype=np.float32))
    vector = DeviceVector(SimpleNamespace(), owner.data.ptr, 10, owner)  # No device is used
    made = CupyArrays("cuda").make(vector, 2, (2, 3), "float32")
    assert made.data.ptr == owner.data.ptr + 8 and made.shape == (2, 3)
    brain = CupyArrays("cuda").make(vector, 2, (2, 3), "bfloat16")
    assert brain.dtype == np.dtype(ml_dtypes.bfloat16) and brain.data.ptr != made.data.ptr


@pytest.mark.parametrize("error", [CompileException("no cuda_fp16.h"), RuntimeError("no CUDA root: no cuda_fp16.h")])
def test_without_cudas_headers_nothing_is_converted_and_it_says_what_is_missing(
    cupy: FakeCupy, error: Exception
) -> None:
    arrays, cupy.conversion = CupyArrays("cuda"), error
    owner = FakeArray(np.zeros(6, np.float32))
    vector = DeviceVector(SimpleNamespace(), owner.data.ptr, 6, owner)  # No device is used
    assert arrays.take("w", owner).address == owner.data.ptr
    for convert in (
        lambda: arrays.take("w", FakeArray(np.zeros(6, np.float16))),
        lambda: arrays.make(vector, 0, (6,), "float16"),
    ):
        with pytest.raises(DeviceUnavailableError, match=r"nvidia-cuda-runtime-cu12.*no cuda_fp16\.h") as caught:
            convert()
        assert caught.value.details["missing"] == "headers"
    assert cupy.current == 5
    cupy.conversion = FakeError("launch failure")
    with pytest.raises(DeviceLostError, match="launch failure"):
        arrays.make(vector, 0, (6,), "float16")


def test_a_thread_that_has_no_device_is_not_given_another_one(cupy: FakeCupy) -> None:
    cupy.context = 0
    CupyArrays("cuda").synchronize()
    assert cupy.current == 0


def test_an_error_of_cuda_is_a_lost_device(cupy: FakeCupy) -> None:
    arrays = CupyArrays("cuda")
    arrays.synchronize()
    assert cupy.synchronized == 1
    cupy.failure = "an illegal address"
    with pytest.raises(DeviceLostError, match="an illegal address"):
        arrays.synchronize()
    assert cupy.current == 5


@pytest.mark.parametrize("error", [MemoryError("out of memory"), FakeError("out of memory", status=2)])
def test_memory_that_is_used_up_is_no_lost_device(cupy: FakeCupy, error: Exception) -> None:
    arrays, cupy.conversion = CupyArrays("cuda"), error
    with pytest.raises(LimitExceededError, match=r"cuda has no room for reading tensor 'w'.*float32"):
        arrays.take("w", FakeArray(np.zeros(6, np.float16)))
    arrays.synchronize()


def test_arrays_of_the_host_are_not_on_a_device() -> None:
    for value in (np.zeros(3), 1.0, [1.0], SimpleNamespace(__dlpack_device__=lambda: (1, 0))):
        assert not is_on_device(value)
    array = FakeArray(np.zeros(3, np.float32), number=3)
    assert is_on_device(array) and number_of(array) == 3
    managed = SimpleNamespace(__dlpack_device__=lambda: (13, 1))
    assert is_on_device(managed) and number_of(managed) == 1
