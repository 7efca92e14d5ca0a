"""CUDA C to machine code by NVRTC, and the options by which the results are numpy's.

The options turn contraction off and keep denormal numbers, so that every operation is rounded as written: the default
of NVRTC contracts ``a * b + c``, and CuPy adds ``-ftz=true`` to whatever it compiles itself. Therefore no source is
given to CuPy; it loads what is compiled here (``device``).

``compile_source`` needs no device: the library is that of the wheel ``nvidia-cuda-nvrtc-cu12``, or the toolkit's. So
every source can be compiled where there is none.
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

#: Of every source.
OPTIONS: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17")
#: The architectures for which sources are compiled in tests: the oldest that is supported, and Hopper.
ARCHITECTURES: Final = ("sm_75", "sm_90")

_FOLDER: Final = Path(__file__).parent
_SONAMES: Final = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so")
#: Where toolkits are installed.
_TOOLKIT: Final = "/usr/local/cuda"
#: NVRTC's numbers of errors: among OPTIONS only the architecture is one that it may not know; and its library of
#: builtins cannot be loaded.
_INVALID_OPTION: Final = 5
_NO_BUILTINS: Final = 7
#: Packages of the wheels, and where in them the library lies.
_PACKAGES: Final = ("cuda_nvrtc", "cu13")


@cache
def common_source() -> str:
    """The text that sources of kernels begin with: names of types, and casts."""
    return (_FOLDER / "common.cu").read_text(encoding="utf-8")


def compile_source(source: str, architecture: str, options: Sequence[str] = OPTIONS) -> bytes:
    """The CUBIN of a CUDA C ``source``.

    architecture: such as "sm_90".

    Raises DeviceUnavailableError where there is no NVRTC, or none that knows the architecture, and InternalError with
    its log where it refuses the source.
    """
    library = nvrtc()
    with _program(library, source) as program:
        texts = [text.encode() for text in (f"--gpu-architecture={architecture}", *options)]
        result = library.nvrtcCompileProgram(program, len(texts), (ctypes.c_char_p * len(texts))(*texts))
        if result == _INVALID_OPTION:
            raise DeviceUnavailableError(
                f"this NVRTC does not know {architecture}, the architecture of the device: install another one, as by "
                "pip install -U nvidia-cuda-nvrtc-cu12",
                missing="nvrtc",
            )
        if result:
            log = _taken(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(bytes(1)).decode()
            if result == _NO_BUILTINS:
                raise DeviceUnavailableError(
                    f"NVRTC lacks a part of itself ({log.strip():.2000}): install it anew, as by "
                    "pip install -U --force-reinstall nvidia-cuda-nvrtc-cu12",
                    missing="nvrtc",
                )
            raise InternalError(f"NVRTC for {architecture} ({result}): {log}")
        return _taken(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)


@cache
def nvrtc() -> Any:
    """NVRTC, loaded. Raises DeviceUnavailableError where it cannot be found."""
    for name in _candidates():
        with suppress(OSError):
            _load_builtins(Path(name))
            library = ctypes.CDLL(name)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise DeviceUnavailableError(
        "NVRTC is not installed, which compiles kernels: pip install nvidia-cuda-nvrtc-cu12", missing="nvrtc"
    )


def _load_builtins(path: Path) -> None:
    """Loads what lies beside NVRTC, which then finds it by its name: the library of CUDA 13.0's wheel does not look in
    its own folder."""
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
    """What a pair of functions of NVRTC returns: the size of a text, and the text."""
    size = ctypes.c_size_t()
    _check(nvrtc(), size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc(), take(program, text))
    return text.raw


def _check(library: Any, result: int) -> None:
    if result:
        raise InternalError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")
