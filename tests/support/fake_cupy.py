"""Fake of the part of CuPy that ``psdist.device.device`` uses, in host memory, for tests of that module.

Its functions have the names, argument order and results of CuPy 14. Kernels are not run; their calls are recorded. Any
function can be made to fail with a CUDA error.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeCudaError(RuntimeError):
    """CUDA error with its number."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Memory:
    """Device memory, or pinned host memory, by ``name``."""

    def __init__(self, fake: FakeCupy, name: str, size: int) -> None:
        fake.fail(name)
        self.held = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self.held)


class Kernel:
    """Kernel of a module. It is loaded when it is compiled."""

    def __init__(self, fake: FakeCupy, name: str) -> None:
        self.fake, self.name = fake, name
        fake.found.append(name)

    def compile(self) -> None:
        self.fake.fail("compile")

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        self.fake.calls.append((self.name, grid, block, arguments, self.fake.current_streams[-1]))


class FakeCupy(ModuleType):
    """Fake of the module.

    failures: exceptions by the name of a function of ``cuda.runtime``, "Memory" or "PinnedMemory".
    calls: kernel launches with grid, block, arguments and current stream.
    registered: registered addresses.
    found: names of kernels that were looked up.
    contexts: devices that have a context; a new thread has none.
    """

    def __init__(self, count: int = 1, **failures: BaseException) -> None:
        super().__init__("cupy")
        self.failures: dict[str, BaseException] = dict(failures)
        self.calls: list[tuple[Any, ...]] = []
        self.registered: set[int] = set()
        self.found: list[str] = []
        self.contexts: set[int] = set()
        self.current_streams: list[Any] = []
        self._thread = threading.local()
        functions = {
            name.removeprefix("do_"): self._guarded(name) for name in dir(type(self)) if name.startswith("do_")
        }
        kinds = {"memcpyHostToDevice": 1, "memcpyDeviceToHost": 2, "CUDARuntimeError": FakeCudaError}
        self._count = count
        fake = self

        class Stream:
            """Stream in which everything completes immediately."""

            def __init__(self, non_blocking: bool = False) -> None:
                self.ptr = 77

            def synchronize(self) -> None:
                fake.fail("synchronize")

            def __enter__(self) -> Stream:
                fake.current_streams.append(self)
                return self

            def __exit__(self, *_: object) -> None:
                fake.current_streams.pop()

        class RawModule:
            """Module of a file."""

            def __init__(self, *, path: str) -> None:
                self.content = Path(path).read_bytes()

            def get_function(self, name: str) -> Any:
                assert name.encode() in self.content, "no kernel of this name"
                return Kernel(fake, name)

        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(**functions, **kinds),
            driver=SimpleNamespace(CUDADriverError=FakeCudaError, ctxGetCurrent=self._current_context),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
            Memory=partial(Memory, self, "Memory"), PinnedMemory=partial(Memory, self, "PinnedMemory"), Stream=Stream,
        )  # fmt: skip

    def fail(self, name: str) -> None:
        """Raise the failure planned for ``name``."""
        if name in self.failures:
            raise self.failures[name]

    def _guarded(self, name: str) -> Any:
        function = getattr(self, name)

        def called(*arguments: Any) -> Any:
            self.fail(name.removeprefix("do_"))
            return function(*arguments)

        return called

    def do_getDeviceCount(self) -> int:
        return self._count

    def do_getDevice(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def do_setDevice(self, number: int) -> None:
        self._thread.device = number
        self.contexts.add(number)

    def _current_context(self) -> int:
        return 1 + self.do_getDevice() if hasattr(self._thread, "device") else 0

    def do_free(self, address: int) -> None:
        assert address == 0

    def do_getDeviceProperties(self, number: int) -> dict[str, Any]:
        return {"name": b"Fake", "major": 9, "minor": 0}

    def do_driverGetVersion(self) -> int:
        return 11080

    def do_runtimeGetVersion(self) -> int:
        return 12090

    def do_memGetInfo(self) -> tuple[int, int]:
        return 5, 7

    def do_memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 2) and stream == 77
        ctypes.memmove(target, source, size)

    def do_memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        assert stream == 77
        ctypes.memset(address, value, size)

    def do_hostRegister(self, address: int, size: int, flags: int) -> None:
        assert size > 0 and flags == 0
        self.registered.add(address)

    def do_hostUnregister(self, address: int) -> None:
        self.registered.remove(address)
