"""An unavailable device is rejected with the missing part, and a source that does not compile with the log."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from psdist.device import device as compiling
from psdist.device.device import CudaDevice, compile_source, device_number, open_device
from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
)
from tests.support.fake_cupy import FakeCudaError, FakeCupy


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:7", 7)])
def test_names(name: str, number: int) -> None:
    assert device_number(name) == number


def test_other_names_are_refused() -> None:
    for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda0", "cpu"]:
        with pytest.raises(InvalidArgumentError, match="cuda:N"):
            device_number(name)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match="pip install cupy-cuda12x") as caught:
        open_device("cuda")
    assert caught.value.details["missing"] == "cupy"


@pytest.mark.parametrize(
    ("cupy", "missing", "text"),
    [
        (
            FakeCupy(getDeviceCount=FakeCudaError(35, "insufficient")),
            "driver",
            "the driver is CUDA 11.8.* for CUDA 12.9",
        ),
        (FakeCupy(getDeviceCount=FakeCudaError(100, "no device")), "device", "no device"),
        (FakeCupy(0), "device", "none at all"),
        (FakeCupy(2), "device", "cuda:0 to cuda:1"),
        (FakeCupy(4, free=FakeCudaError(2, "out of memory")), "memory", "nvidia-smi"),
        (FakeCupy(4, free=FakeCudaError(46, "all devices are busy")), "device", "busy"),
        (
            FakeCupy(4, compile=FakeCudaError(222, "unsupported toolchain")),
            "driver",
            r"the driver \(CUDA 11.8\) cannot load .* newer driver",
        ),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cupy: ModuleType, missing: str, text: str
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
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


def test_builtins_are_loaded_from_beside_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA 13.0's NVRTC does not find them by itself."""
    loaded: list[str] = []
    monkeypatch.setattr(compiling.ctypes, "CDLL", loaded.append)
    names = ["libnvrtc-builtins.alt.so.13.0", "libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]
    for name in names:
        (tmp_path / name).write_text("")
    compiling._load_builtins(tmp_path / names[2])
    assert loaded == [str(tmp_path / names[1])]
    compiling._load_builtins(Path("libnvrtc.so.13"))
    assert len(loaded) == 1


def test_an_nvrtc_without_its_builtins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.nvrtc(), "nvrtcCompileProgram", lambda *_: 7)
    with pytest.raises(DeviceUnavailableError, match="NVRTC is incomplete") as caught:
        compile_source(_SOURCE, "sm_90")
    assert caught.value.details["missing"] == "nvrtc"


def test_an_error_in_the_middle_is_a_lost_device() -> None:
    device = CudaDevice(FakeCupy(memGetInfo=FakeCudaError(700, "illegal address")), 0)
    assert device.name == "cuda:0 (Fake)"
    with pytest.raises(DeviceLostError, match="illegal address"):
        device.memory()


def test_an_nvrtc_that_does_not_know_the_device_is_refused() -> None:
    with pytest.raises(DeviceUnavailableError, match="does not know sm_20, the architecture of the device") as caught:
        compile_source(_SOURCE, "sm_20")
    assert caught.value.details["missing"] == "nvrtc"


def test_a_device_that_is_there_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(8))
    device = open_device("cuda:2")
    assert device.name == "cuda:2 (Fake)"
    assert device.memory() == (5, 7)


def test_a_wrong_source_is_refused_with_the_log() -> None:
    with pytest.raises(InternalError, match="undefined"):
        compile_source('extern "C" __global__ void broken(float* out) { out[0] = nothing; }', "sm_90")


_SOURCE = 'extern "C" __global__ void twice(float* values, long long size) { values[threadIdx.x] *= 2.0f; }'


def test_a_source_is_compiled_once_and_its_kernels_get_what_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    cupy = FakeCupy()
    device = CudaDevice(cupy, 0)
    kernel, stream = device.kernels(_SOURCE)("twice"), device.stream()
    arguments = (np.uint64(4096), np.int64(3))
    device.launch(kernel, 5, 128, arguments, stream)
    assert cupy.calls == [("twice", (5,), (128,), arguments, stream)]
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".cubin" and file.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr("psdist.device.device.compile_source", lambda *_: pytest.fail("it is cached"))
    assert CudaDevice(FakeCupy(), 0).kernels(_SOURCE)("twice") is not None


def test_a_kernel_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    cupy = FakeCupy()
    device = CudaDevice(cupy, 0)
    assert device.kernels(_SOURCE)("twice") is device.kernels(_SOURCE)("twice")
    assert cupy.found == ["twice"]


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert CudaDevice(FakeCupy(), 0).kernels(_SOURCE)("twice") is not None


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert CudaDevice(FakeCupy(), 0).kernels(_SOURCE)("twice") is not None


def test_bytes_go_there_and_back() -> None:
    device = CudaDevice(FakeCupy(), 0)
    stream, memory, pinned = device.stream(), device.allocate(40), device.pinned(40)
    pinned[:] = np.arange(40)
    device.copy_in(memory.address, pinned, stream)
    device.clear(memory.address + 8, 8, stream)
    out = np.empty(10, np.float32)
    device.copy_out(out, memory.address, stream)
    device.wait(stream)
    expected = np.arange(40, dtype=np.uint8)
    expected[8:16] = 0
    assert (out.view(np.uint8) == expected).all() and memory.size == 40
    assert device.allocated == 40
    del memory
    assert device.allocated == 0
    assert device.memory() == (5, 7)


def test_pinned_memory_lasts_as_long_as_an_array_looks_into_it() -> None:
    device = CudaDevice(FakeCupy(), 0)
    part = device.pinned(1 << 20)[4096:8192].view(np.float32)
    part[:] = 7
    assert part.base is not None and (part == 7).all()


def test_without_room_the_free_memory_is_named() -> None:
    for error in (FakeCudaError(2, "out of memory"), MemoryError("out of memory")):
        device = CudaDevice(FakeCupy(Memory=error), 0)
        with pytest.raises(LimitExceededError, match="no room for 1,000 bytes more: 5 of its 7 are free"):
            device.allocate(1000)
        assert device.allocated == 0
    with pytest.raises(DeviceLostError, match="launch failure"):
        CudaDevice(FakeCupy(Memory=FakeCudaError(719, "launch failure")), 0).allocate(1000)


def test_without_room_for_pinned_memory_the_device_can_be_used_as_before() -> None:
    for error in (FakeCudaError(2, "out of memory"), MemoryError("out of memory")):
        device = CudaDevice(FakeCupy(PinnedMemory=error), 0)
        with pytest.raises(LimitExceededError, match="no room for 1,000 bytes more of pinned memory"):
            device.pinned(1000)
    with pytest.raises(DeviceLostError, match="launch failure"):
        CudaDevice(FakeCupy(PinnedMemory=FakeCudaError(719, "launch failure")), 0).pinned(1000)


def test_memory_that_cannot_be_registered_is_used_as_it_is() -> None:
    values = np.zeros(1024, np.float32)
    cupy = FakeCupy()
    device = CudaDevice(cupy, 0)
    assert device.register(values) and cupy.registered == {values.ctypes.data}
    device.unregister(values)
    assert not cupy.registered
    cupy.failures["hostRegister"] = FakeCudaError(801, "not supported")
    assert not device.register(values)


@pytest.mark.parametrize("name", ["memcpyAsync", "memsetAsync", "synchronize"])
def test_every_failure_is_a_lost_device(name: str) -> None:
    device = CudaDevice(FakeCupy(**{name: FakeCudaError(719, "unspecified launch failure")}), 0)
    stream, memory, values = device.stream(), device.allocate(16), np.zeros(4, np.float32)
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        device.copy_in(memory.address, values, stream)
        device.clear(memory.address, 16, stream)
        device.wait(stream)


def test_each_thread_works_on_the_device_and_keeps_its_own() -> None:
    cupy = FakeCupy(4)
    device = CudaDevice(cupy, 2)
    seen: list[int] = []
    monitored = cupy.cuda.runtime.memGetInfo
    cupy.cuda.runtime.memGetInfo = lambda: (seen.append(cupy.do_getDevice()), monitored())[1]

    def work() -> None:
        cupy.do_setDevice(1)
        device.memory()
        seen.append(cupy.do_getDevice())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [2, 1]


def test_no_other_device_gets_a_context() -> None:
    """A thread without a device would be reset to device 0, which creates a context there."""
    cupy = FakeCupy(4)
    device = CudaDevice(cupy, 2)
    for _ in range(2):
        thread = threading.Thread(target=device.memory)
        thread.start()
        thread.join()
    device.memory()
    assert cupy.contexts == {2} and cupy.do_getDevice() == 2
