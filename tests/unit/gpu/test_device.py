"""A device that cannot be had is refused with what is missing, and sources that cannot be compiled with the log."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from psdist.errors import DeviceLostError, DeviceUnavailableError, InternalError, InvalidArgumentError
from psdist.gpu import compile as compiling
from psdist.gpu.compile import compile_source
from psdist.gpu.device import CudaDevice, device_number, open_device


class FakeCudaError(RuntimeError):
    """An error of CUDA."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def fake_cupy(count: int = 1, error: FakeCudaError | None = None, at: str = "getDeviceCount") -> ModuleType:
    """CuPy, as far as a device is opened by it. error: what the function ``at`` raises."""

    def answer(name: str, value: Any) -> Any:
        def called(*_: Any) -> Any:
            if error is not None and name == at:
                raise error
            return value

        return called

    properties = {"name": b"Fake", "major": 9, "minor": 0}
    answers = {
        "getDeviceCount": count,
        "getDevice": 0,
        "setDevice": None,
        "free": None,
        "getDeviceProperties": properties,
        "driverGetVersion": 11080,
        "runtimeGetVersion": 12090,
        "memGetInfo": (5, 7),
    }
    runtime = SimpleNamespace(
        CUDARuntimeError=FakeCudaError, **{name: answer(name, one) for name, one in answers.items()}
    )
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime, driver=SimpleNamespace(CUDADriverError=FakeCudaError), nvrtc=SimpleNamespace(getVersion=int)
    )
    return cupy


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:7", 7)])
def test_names(name: str, number: int) -> None:
    assert device_number(name) == number


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda0", "cpu"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cuda:N"):
        device_number(name)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match=r"pip install 'psdist\[gpu\]'") as caught:
        open_device("cuda")
    assert caught.value.details["missing"] == "cupy"


@pytest.mark.parametrize(
    ("cupy", "missing", "text"),
    [
        (fake_cupy(error=FakeCudaError(35, "insufficient")), "driver", "the driver is CUDA 11.8.* for CUDA 12.9"),
        (fake_cupy(error=FakeCudaError(100, "no device")), "device", "no device"),
        (fake_cupy(count=0), "device", "none at all"),
        (fake_cupy(count=2), "device", "cuda:0 to cuda:1"),
        (fake_cupy(4, FakeCudaError(2, "out of memory"), "free"), "memory", "nvidia-smi"),
        (fake_cupy(4, FakeCudaError(46, "all devices are busy"), "free"), "device", "busy"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, cupy: ModuleType, missing: str, text: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceUnavailableError, match=text) as caught:
        open_device("cuda:3")
    assert caught.value.details["missing"] == missing


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_candidates", lambda: iter(["libno-such-nvrtc.so"]))
    compiling.nvrtc.cache_clear()
    try:
        with pytest.raises(DeviceUnavailableError, match="nvidia-cuda-nvrtc-cu12"):
            compiling.nvrtc()
    finally:
        compiling.nvrtc.cache_clear()


def test_an_error_in_the_middle_is_a_lost_device() -> None:
    device = CudaDevice(fake_cupy(error=FakeCudaError(700, "illegal address"), at="memGetInfo"), 0)
    assert device.name == "cuda:0 (Fake)"
    with pytest.raises(DeviceLostError, match="illegal address"):
        device.memory()


def test_a_device_that_is_there_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=8))
    device = open_device("cuda:2")
    assert device.name == "cuda:2 (Fake)"
    assert device.memory() == (5, 7)


def test_a_wrong_source_is_refused_with_the_log() -> None:
    with pytest.raises(InternalError, match="undefined"):
        compile_source('extern "C" __global__ void broken(float* out) { out[0] = nothing; }', "sm_90")
