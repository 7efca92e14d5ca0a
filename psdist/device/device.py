"""CUDA devices: compilation of CUDA C by NVRTC, memory, streams and launches by way of CuPy.

**Compilation.** The options turn contraction off and keep denormals, so that every operation is rounded as written.
NVRTC contracts ``a * b + c`` by default, and CuPy adds ``-ftz=true`` to everything that it compiles. So CuPy never gets
a source; it loads the output of ``compile_source``.

``compile_source`` needs no device: the library is that of the wheel ``nvidia-cuda-nvrtc-cu12``, or the toolkit's.
Every source can therefore be compiled on a machine without a GPU.

**Devices.** CuPy is imported when a device is opened.

A ``Device`` works with addresses and bytes, not arrays: ``launch`` takes numpy scalars of exactly the types that the
kernel declares (np.uint64 for an address). Tests have another implementation, which runs the same sources on the CPU
(``tests/support/host_device.py``).

Invariants: Work on one stream runs in order. Methods may be called from any thread, provided no other thread uses the
same stream at the same time. Every CUDA error except running out of memory becomes DeviceLostError; the device must not
be used after that.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from psdist.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
)

#: Options of every compilation.
OPTIONS: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17")
#: Architectures that tests compile for: the oldest supported one, and Hopper.
ARCHITECTURES: Final = ("sm_75", "sm_90")

_FOLDER: Final = Path(__file__).parent
_SONAMES: Final = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so")
#: Installation folder of toolkits.
_TOOLKIT: Final = "/usr/local/cuda"
#: Error numbers of NVRTC: an invalid option, which among OPTIONS can only be the architecture; and a library of
#: builtins that cannot be loaded.
_INVALID_OPTION: Final = 5
_NO_BUILTINS: Final = 7
#: Packages of the wheels that contain the library.
_PACKAGES: Final = ("cuda_nvrtc", "cu13")


@cache
def common_source() -> str:
    """Return the source that every kernel source begins with: type names and casts."""
    return (_FOLDER / "common.cu").read_text(encoding="utf-8")


def compile_source(source: str, architecture: str, options: Sequence[str] = OPTIONS) -> bytes:
    """Compile a CUDA C ``source`` to a CUBIN.

    architecture: such as "sm_90".

    Raises DeviceUnavailableError without an NVRTC that knows the architecture, and InternalError with NVRTC's log if
    it rejects the source.
    """
    library = nvrtc()
    with _program(library, source) as program:
        texts = [text.encode() for text in (f"--gpu-architecture={architecture}", *options)]
        result = library.nvrtcCompileProgram(program, len(texts), (ctypes.c_char_p * len(texts))(*texts))
        if result == _INVALID_OPTION:
            raise DeviceUnavailableError(
                f"this NVRTC does not know {architecture}, the architecture of the device: install a newer one, "
                "such as by pip install -U nvidia-cuda-nvrtc-cu12",
                missing="nvrtc",
            )
        if result:
            log = _taken(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(bytes(1)).decode()
            if result == _NO_BUILTINS:
                raise DeviceUnavailableError(
                    f"NVRTC is incomplete ({log.strip():.2000}): reinstall it, such as by "
                    "pip install -U --force-reinstall nvidia-cuda-nvrtc-cu12",
                    missing="nvrtc",
                )
            raise InternalError(f"NVRTC for {architecture} ({result}): {log}")
        return _taken(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)


@cache
def nvrtc() -> Any:
    """Load NVRTC. Raises DeviceUnavailableError if it cannot be found."""
    for name in _candidates():
        with suppress(OSError):
            _load_builtins(Path(name))
            library = ctypes.CDLL(name)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise DeviceUnavailableError(
        "NVRTC, which compiles kernels, is not installed: pip install nvidia-cuda-nvrtc-cu12", missing="nvrtc"
    )


def _load_builtins(path: Path) -> None:
    """Load the builtins beside NVRTC, so that it finds them: CUDA 13.0's wheel does not search its own folder."""
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")) if path.is_absolute() else ():
        with suppress(OSError):
            ctypes.CDLL(str(builtins))


def _candidates() -> Iterator[str]:
    with suppress(ImportError):
        spec = find_spec("nvidia")
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for package in _PACKAGES:
                folder = Path(root) / package / "lib"
                yield from (str(folder / name) for name in _SONAMES if (folder / name).exists())
    toolkit = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
    if toolkit:
        yield from (str(Path(toolkit) / "lib64" / name) for name in _SONAMES)
    yield from _SONAMES
    yield from (str(Path(_TOOLKIT) / "lib64" / name) for name in _SONAMES)


@contextmanager
def _program(library: Any, source: str) -> Iterator[ctypes.c_void_p]:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"psdist.cu", 0, None, None))
    try:
        yield program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _taken(size_of: Any, take: Any, program: ctypes.c_void_p) -> bytes:
    """Return the text of a pair of NVRTC functions: one for its size, one for its content."""
    size = ctypes.c_size_t()
    _check(nvrtc(), size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc(), take(program, text))
    return text.raw


def _check(library: Any, result: int) -> None:
    if result:
        raise InternalError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


AnyArray = NDArray[Any]
#: Stream of a device, opaque to callers.
Stream = Any
#: Kernel of a device, opaque to callers.
DeviceKernel = Any

_NAME: Final = re.compile(r"cuda(?::(\d{1,3}))?")
#: Error numbers of CUDA.
_OUT_OF_MEMORY, _INSUFFICIENT_DRIVER, _INITIALIZATION, _NO_DEVICE, _INVALID_DEVICE = 2, 35, 3, 100, 101
#: Errors of a driver that cannot load a compiled kernel: bad image, no binary for this device, unsupported PTX
#: version.
_UNLOADABLE: Final = (200, 209, 222)
#: Kernel that is loaded when a device is opened.
_PROBE: Final = 'extern "C" __global__ void probe() {}'


class Allocation(Protocol):
    """Device memory. It is freed when nothing refers to this object any more."""

    @property
    def address(self) -> int:
        """Start address, a multiple of 256."""

    @property
    def size(self) -> int:
        """Size in bytes."""


class Device(Protocol):
    """Interface of a device.

    name: the user's name for the device, and its model.
    allocated: bytes of ``allocate`` that are in use.
    """

    name: str
    allocated: int

    def kernels(self, source: str) -> Callable[[str], DeviceKernel]:
        """Compile a source once. Return a function that finds its kernels by name."""

    def allocate(self, size: int) -> Allocation:
        """Allocate ``size`` uninitialized bytes of device memory. Raises LimitExceededError if there is no room."""

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate ``size`` bytes of pinned host memory. Copies between it and the device run beside kernels.

        Raises LimitExceededError if the system has no room.
        """

    def stream(self) -> Stream:
        """Create a stream."""

    def copy_in(self, address: int, values: AnyArray, stream: Stream) -> None:
        """Copy contiguous ``values`` to the device. They must not change until the stream has reached the copy."""

    def copy_out(self, values: AnyArray, address: int, stream: Stream) -> None:
        """Copy from the device to contiguous ``values``, which are complete once the stream has reached the copy."""

    def clear(self, address: int, size: int, stream: Stream) -> None:
        """Write zeros to ``size`` bytes of device memory."""

    def launch(
        self, kernel: DeviceKernel, grid: int, block: int, arguments: Sequence[np.generic], stream: Stream
    ) -> None:
        """Run a kernel of ``kernels`` with ``grid`` blocks of ``block`` threads each."""

    def wait(self, stream: Stream) -> None:
        """Wait until all work on the stream is done."""

    def register(self, array: AnyArray) -> bool:
        """Pin host memory, so that copies to and from it run in parallel with kernels.

        Returns False if the system does not allow it; copies are then slower. Call ``unregister`` before freeing the
        memory.
        """

    def unregister(self, array: AnyArray) -> None:
        """Undo ``register``."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory."""


def device_number(name: str) -> int:
    """Return the number in "cuda" (0) or "cuda:N". Raises InvalidArgumentError for another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidArgumentError(f"device {name!r:.40} is neither cpu, cuda nor cuda:N, where N is a number")
    return int(match[1] or 0)


def open_device(name: str) -> CudaDevice:
    """Open the device "cuda" (the first one) or "cuda:N".

    Raises InvalidArgumentError for another name, and DeviceUnavailableError, which names what is missing.
    """
    number = device_number(name)
    cupy = _cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise _unusable(cupy, name, error) from None
    if number >= count:
        numbers = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "none at all"
        raise DeviceUnavailableError(
            f"there is no {name} on this machine, which has {numbers}: name one of them, and check "
            "CUDA_VISIBLE_DEVICES, which hides devices",
            missing="device",
        )
    with suppress(Exception):  # Load the NVRTC beside CuPy first, so that it is found by name.
        cupy.cuda.nvrtc.getVersion()
    nvrtc()
    try:
        device = CudaDevice(cupy, number)
        device.load_probe()
        return device
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, MemoryError) as error:
        raise _unusable(cupy, name, error) from None


def is_out_of_memory(error: BaseException) -> bool:
    """True if a CuPy error only means that memory is used up. The device remains usable."""
    return isinstance(error, MemoryError) or getattr(error, "status", 0) == _OUT_OF_MEMORY


def _cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise DeviceUnavailableError(
            f"CuPy is not installed, or cannot be loaded ({error}): pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 "
            "nvidia-cuda-runtime-cu12, or cupy-cuda13x with its NVRTC for a driver of CUDA 13",
            missing="cupy",
        ) from None


def _unusable(cupy: Any, name: str, error: BaseException) -> DeviceUnavailableError:
    """Return the error that says why a device cannot be opened."""
    status = getattr(error, "status", 0)
    if is_out_of_memory(error):
        return DeviceUnavailableError(
            f"{name} has no memory left ({error}): end what else uses it (nvidia-smi), or name another",
            missing="memory",
        )
    if status in (_INSUFFICIENT_DRIVER, _INITIALIZATION):
        driver, runtime = _version(cupy.cuda.runtime.driverGetVersion), _version(cupy.cuda.runtime.runtimeGetVersion)
        return DeviceUnavailableError(
            f"no usable NVIDIA driver for {name}: the driver is {driver}, and CuPy needs one for {runtime}. Install a "
            "newer driver, or the CuPy of an older CUDA",
            missing="driver",
        )
    if status in _UNLOADABLE:
        return DeviceUnavailableError(
            f"the driver ({_version(cupy.cuda.runtime.driverGetVersion)}) cannot load what NVRTC compiles for {name} "
            f"({error}): install a newer driver, or the NVRTC of its CUDA",
            missing="driver",
        )
    return DeviceUnavailableError(f"{name} cannot be used: {error}", missing="device")


def _version(get: Callable[[], int]) -> str:
    with suppress(Exception):
        if number := get():
            return f"CUDA {number // 1000}.{number % 1000 // 10}"
    return "missing"


@contextmanager
def current_device(cupy: Any, number: int) -> Iterator[None]:
    """Make a device the calling thread's current one for a while.

    If the thread had no current device, this one stays: since CUDA 12, setting device 0 would create a context on it
    that nobody needs. CuPy's ``with device`` is not used because any number of threads may be in here together.
    """
    runtime = cupy.cuda.runtime
    before = number
    with suppress(cupy.cuda.driver.CUDADriverError):  # The driver is not initialized yet.
        before = runtime.getDevice() if cupy.cuda.driver.ctxGetCurrent() else number
    runtime.setDevice(number)
    try:
        yield
    finally:
        if before != number:
            runtime.setDevice(before)


class CudaDevice:
    """CUDA device, used through CuPy.

    cupy: the module.
    number: number of the device.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._number = number
        self._errors = (self._runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, MemoryError)
        self._lock = Lock()
        self._count_lock = RLock()  # A finalizer may free an allocation while the same thread counts another.
        self.allocated = 0
        self._finders: dict[str, Callable[[str], DeviceKernel]] = {}
        with self._current():
            self._runtime.free(0)  # Creates the context, so that a missing part shows here.
            properties = self._runtime.getDeviceProperties(number)
        kind = properties["name"]
        self._architecture = f"sm_{properties['major']}{properties['minor']}"
        self.name = f"cuda:{number} ({kind.decode() if isinstance(kind, bytes) else kind})"

    @contextmanager
    def _used(self, what: str) -> Iterator[None]:
        """Make this device the thread's current one, and convert its errors to DeviceLostError."""
        try:
            with self._current():
                yield
        except self._errors as error:
            raise DeviceLostError(f"{self.name}: {what} failed: {error}", device=self.name) from error

    def _current(self) -> AbstractContextManager[None]:
        return current_device(self._cupy, self._number)

    def load_probe(self) -> None:
        """Load a kernel, so that a driver which cannot do that fails here. Raises CuPy's errors."""
        with self._current():
            path = _compiled(_PROBE, self._architecture)
            self._cupy.RawModule(path=str(path)).get_function("probe").compile()

    def kernels(self, source: str) -> Callable[[str], DeviceKernel]:
        with self._lock, self._used("loading kernels"):
            if source not in self._finders:
                path = _compiled(source, self._architecture)
                # CuPy makes a new kernel object each time, and looks it up in the module at its first launch.
                self._finders[source] = cache(partial(self._kernel, self._cupy.RawModule(path=str(path))))
            return self._finders[source]

    def _kernel(self, module: Any, name: str) -> DeviceKernel:
        with self._used(f"loading kernel {name}"):
            return module.get_function(name)

    def allocate(self, size: int) -> Allocation:
        with self._used(f"an allocation of {size:,} bytes"):
            try:
                made = _CudaAllocation(self._cupy.cuda.Memory(max(1, size)), size, self._count)
                self._count(size)
                return made
            except self._errors as error:
                if not is_out_of_memory(error):
                    raise
                free, total = self._runtime.memGetInfo()
        raise LimitExceededError(
            f"{self.name} has no room for {size:,} bytes more: {free:,} of its {total:,} are free. End what else uses "
            "it, or name another device; parameters can be divided among more servers, each with a device of its own"
        )

    def _count(self, size: int) -> None:
        with self._count_lock:
            self.allocated += size

    def pinned(self, size: int) -> NDArray[np.uint8]:
        with self._used(f"an allocation of {size:,} pinned bytes"):
            try:
                return np.asarray(_PinnedMemory(self._cupy.cuda.PinnedMemory(max(1, size)), size))
            except self._errors as error:
                if not is_out_of_memory(error):
                    raise
        raise LimitExceededError(
            f"{self.name}: the host has no room for {size:,} bytes more of pinned memory, which copies to it need. End "
            "what else uses the host's memory, or raise the container's memory limit"
        )

    def stream(self) -> Stream:
        with self._used("a new stream"):
            return self._cupy.cuda.Stream(non_blocking=True)

    def copy_in(self, address: int, values: AnyArray, stream: Stream) -> None:
        kind = self._runtime.memcpyHostToDevice
        with self._used("a copy to the device"):
            self._runtime.memcpyAsync(address, values.ctypes.data, values.nbytes, kind, stream.ptr)

    def copy_out(self, values: AnyArray, address: int, stream: Stream) -> None:
        kind = self._runtime.memcpyDeviceToHost
        with self._used("a copy from the device"):
            self._runtime.memcpyAsync(values.ctypes.data, address, values.nbytes, kind, stream.ptr)

    def clear(self, address: int, size: int, stream: Stream) -> None:
        with self._used("clearing memory"):
            self._runtime.memsetAsync(address, 0, size, stream.ptr)

    def launch(
        self, kernel: DeviceKernel, grid: int, block: int, arguments: Sequence[np.generic], stream: Stream
    ) -> None:
        with self._used("a kernel"), stream:
            kernel((grid,), (block,), tuple(arguments))

    def wait(self, stream: Stream) -> None:
        with self._used("a kernel or a copy"):
            stream.synchronize()

    def register(self, array: AnyArray) -> bool:
        try:
            with self._current():
                self._runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
        except self._errors:
            return False
        return True

    def unregister(self, array: AnyArray) -> None:
        with self._used("taking a registration back"):
            self._runtime.hostUnregister(array.ctypes.data)

    def memory(self) -> tuple[int, int]:
        with self._used("asking for its memory"):
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)


class _CudaAllocation:
    """Allocation by CuPy.

    memory: CuPy's object, which frees the memory when it is deleted.
    count: called with the negative size at that time.
    """

    def __init__(self, memory: Any, size: int, count: Callable[[int], None]) -> None:
        self._memory = memory
        self.address: int = memory.ptr
        self.size = size
        weakref.finalize(self, count, -size).atexit = False


class _PinnedMemory:
    """Pinned host memory as a numpy buffer.

    memory: CuPy's object, which is freed with the last array that views it.
    """

    def __init__(self, memory: Any, size: int) -> None:
        self._memory = memory
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (memory.ptr, False), "version": 3}


def _compiled(source: str, architecture: str) -> Path:
    """Return the file of a source's CUBIN. The source is compiled unless CuPy's kernel cache holds it."""
    library = nvrtc()
    version = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(*map(ctypes.byref, version))
    key = "\0".join((source, architecture, *OPTIONS, *(str(part.value) for part in version)))
    file = f"psdist-{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    folder = _cache_folder()
    if folder is not None and (folder / file).is_file():
        return folder / file
    cubin = compile_source(source, architecture)
    try:
        if folder is None:
            raise FileNotFoundError
        return _written(folder, file, cubin)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="psdist-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # CuPy reads the file when a kernel is looked up.
        return _written(folder, file, cubin)


def _cache_folder() -> Path | None:
    """Return CuPy's folder of compiled kernels, or None for a user without a home."""
    if chosen := os.environ.get("CUPY_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path.home() / ".cupy" / "kernel_cache"
    except RuntimeError:
        return None


def _written(folder: Path, file: str, content: bytes) -> Path:
    """Write a file atomically: other processes see all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
        made.write(content)
    os.replace(made.name, folder / file)
    return folder / file
