"""Compilation of CUDA C by NVRTC, with options that make results equal to numpy's.

The options turn contraction off and keep denormals, so that every operation is rounded as written. NVRTC contracts ``a
* b + c`` by default, and CuPy adds ``-ftz=true`` to everything that it compiles. So CuPy never gets a source; it loads
the output of this module (``device``).

``compile_source`` needs no device: the library is that of the wheel ``nvidia-cuda-nvrtc-cu12``, or the toolkit's.
Every source can therefore be compiled on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from psdist.errors import DeviceUnavailableError, InternalError

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
