"""A ``psdist.device.device.Device`` on the CPU, for machines without a GPU: the same sources, compiled by g++.

Its memory is host memory. Work on a stream is done immediately, so a missing wait does not show here. Tests can check
arithmetic, barriers within a block (threads run in ascending or descending order), argument types, and allocations.
``host_cuda.h`` explains how a block is run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from psdist.errors import DeviceLostError, LimitExceededError

AnyArray = NDArray[Any]

#: Skips tests without a compiler.
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="runs the kernels' sources by g++")

_HEADER: Final = Path(__file__).with_name("host_cuda.h")
_OPTIONS: Final = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing"),
    "-U_FORTIFY_SOURCE",  # It mistakes a jump between stacks for an error.
)
_KERNEL: Final = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(')
_ARGUMENTS: Final = 64
#: Compiled sources, by digest. Programs with a temporary directory of their own get it by the variable.
FOLDER: Final = Path(os.environ.get("HOST_DEVICE_FOLDER", f"{tempfile.gettempdir()}/psdist-host-kernels-{os.getuid()}"))


class HostAllocation:
    """Device memory.

    ended: called with its size when it is freed.
    """

    def __init__(self, size: int, ended: Callable[[int], None]) -> None:
        self.size = size
        self.bytes = np.empty(size + 256, np.uint8)
        self.bytes.fill(0xFF)  # NaN: reads of uninitialized memory show.
        self.address = -(-_address(self.bytes) // 256) * 256
        self._ended = ended

    def __del__(self) -> None:
        self._ended(self.size)


class HostDevice:
    """Emulated device.

    descending: True to run the threads of a block in descending order.
    memory_bytes: size of its memory.
    allocated: bytes allocated now.
    most: largest value of ``allocated`` so far.
    launches: number of kernels run.
    registered: registered addresses.
    """

    def __init__(self, memory_bytes: int = 1 << 34, *, descending: bool = False) -> None:
        self.name = "cuda:0 (on the processor)"
        self.memory_bytes = memory_bytes
        self.descending = descending
        self.allocated = self.most = self.launches = 0
        self.registered: set[int] = set()
        self._lock = threading.RLock()  # A finalizer may free an allocation while the same thread counts another.
        #: Error of every operation, once it is set.
        self.failure = ""

    def kernels(self, source: str) -> Callable[[str], _HostKernel]:
        """See ``Device``."""
        self._check()
        library = compiled(source)
        return functools.partial(_HostKernel, library)

    def allocate(self, size: int) -> HostAllocation:
        """See ``Device``."""
        self._check()
        if self.allocated + size > self.memory_bytes:
            raise LimitExceededError(f"{self.name} has no room for {size:,} bytes more")
        self._count(size)
        return HostAllocation(size, lambda size: self._count(-size))

    def _count(self, size: int) -> None:
        with self._lock:
            self.allocated += size
            self.most = max(self.most, self.allocated)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """See ``Device``."""
        self._check()
        return np.zeros(size, np.uint8)

    def stream(self) -> object:
        """See ``Device``."""
        return object()

    def copy_in(self, address: int, values: AnyArray, stream: object) -> None:
        """See ``Device``."""
        self._check()
        assert values.flags.c_contiguous
        ctypes.memmove(address, _address(values), values.nbytes)

    def copy_out(self, values: AnyArray, address: int, stream: object) -> None:
        """See ``Device``."""
        self._check()
        assert values.flags.c_contiguous and values.flags.writeable
        ctypes.memmove(_address(values), address, values.nbytes)

    def clear(self, address: int, size: int, stream: object) -> None:
        """See ``Device``."""
        self._check()
        ctypes.memset(address, 0, size)

    def launch(
        self, kernel: _HostKernel, grid: int, block: int, arguments: Sequence[np.generic], stream: object
    ) -> None:
        """See ``Device``."""
        self._check()
        self.launches += 1
        kernel(grid, block, arguments, self.descending)

    def wait(self, stream: object) -> None:
        """See ``Device``."""
        self._check()

    def register(self, array: AnyArray) -> bool:
        """See ``Device``."""
        self._check()
        assert _address(array) not in self.registered
        self.registered.add(_address(array))
        return True

    def unregister(self, array: AnyArray) -> None:
        """See ``Device``."""
        self._check()
        self.registered.remove(_address(array))

    def memory(self) -> tuple[int, int]:
        """See ``Device``."""
        return self.memory_bytes - self.allocated, self.memory_bytes

    def _check(self) -> None:
        if self.failure:
            raise DeviceLostError(f"{self.name}: {self.failure}", device=self.name)


class _HostKernel:
    """Kernel of a compiled source."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._name = name
        self._launch = getattr(library, f"host_launch_{name}")
        sizes = (ctypes.c_uint * _ARGUMENTS)()
        count = getattr(library, f"host_sizes_{name}")(sizes)
        self._sizes = list(sizes[:count])

    def __call__(self, grid: int, block: int, arguments: Sequence[np.generic], descending: bool) -> None:
        assert all(isinstance(one, np.generic) for one in arguments), "numpy's scalars, of the declared types"
        assert [one.itemsize for one in arguments] == self._sizes, f"{self._name} takes {self._sizes}"
        assert 0 < grid < 1 << 31 and 0 < block <= 1024
        held = [np.array(one) for one in arguments]
        pointers = (ctypes.c_void_p * max(1, len(held)))(*map(_address, held))
        self._launch(ctypes.c_uint(grid), ctypes.c_uint(block), ctypes.c_int(descending), pointers)


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """Return the library of a source's kernels, compiled unless an earlier run left it."""
    header = _HEADER.read_text(encoding="utf-8")
    text = "\n".join((header, source, *map(_exported, _KERNEL.findall(source))))
    key = hashlib.sha256("\0".join((text, *_OPTIONS)).encode()).hexdigest()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    library = FOLDER / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / "made.so"
            (Path(folder) / "made.cpp").write_text(text, encoding="utf-8")
            done = subprocess.run(
                ["g++", *_OPTIONS, "-o", made, Path(folder) / "made.cpp"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            os.replace(made, library)
    return ctypes.CDLL(str(library))


def _exported(name: str) -> str:
    """Return C++ that exports a kernel to this process."""
    return f"""
extern "C" void host_launch_{name}(unsigned grid, unsigned threads, int order, void** arguments) {{
    host::launch({name}, grid, threads, order, arguments);
}}
extern "C" int host_sizes_{name}(unsigned* sizes) {{ return host::sizes_of({name}, sizes); }}"""


def _address(array: AnyArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
