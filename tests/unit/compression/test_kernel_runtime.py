"""Kernels are compiled once, including by several concurrent processes, and in any order."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from psdist.compression import kernel_runtime
from psdist.compression.kernel_runtime import compile_all

#: Module of kernels with its own cache directory.
MODULE = """
from psdist.compression.kernel_runtime import IN, OUT, kernel

@kernel(IN, OUT)
def double(values, out):
    for i in range(values.size):
        out[i] = 2 * values[i]

@kernel(IN, OUT)
def triple(values, out):
    for i in range(values.size):
        out[i] = 3 * values[i]
"""
#: Compiles both, and prints for each whether it came from the cache.
SCRIPT = """
import some_kernels
from psdist.compression.kernel_runtime import compile_all
kernels = [some_kernels.double, some_kernels.triple]
compile_all(kernels)
print(*[sum(kernel.compile().stats.cache_hits.values()) for kernel in kernels])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "some_kernels.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("some_kernels", None)


def _lock(module: Path, name: str) -> int:
    """Hold the lock of a kernel, like a process that compiles it."""
    (module / "__pycache__").mkdir(exist_ok=True)
    fd = os.open(module / "__pycache__" / f"some_kernels.{name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_a_kernel_that_another_compiles_comes_last(module: Path) -> None:
    import some_kernels  # type: ignore[import-not-found]

    done = []
    assert not some_kernels.double.is_cached
    other = _lock(module, "double")
    try:
        assert not some_kernels.double.try_compile()

        def compiled() -> None:
            done.append("triple" if not done else "double")
            if len(done) == 1:  # The other process ends, which releases its lock.
                os.close(other)

        thread = threading.Thread(target=compile_all, args=([some_kernels.double, some_kernels.triple], compiled))
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and done == ["triple", "double"]
    finally:
        if not done:
            os.close(other)
    assert some_kernels.double.is_cached
    out = np.zeros(3, np.float32)
    some_kernels.double(np.arange(3, dtype=np.float32), out)
    assert out.tolist() == [0, 2, 4]


def test_a_process_that_stands_still_is_not_waited_for_for_ever(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import some_kernels

    monkeypatch.setattr(kernel_runtime, "LOCK_SECONDS", 0.01)
    other = _lock(module, "double")
    try:
        compile_all([some_kernels.double])
    finally:
        os.close(other)


def test_processes_share_the_work(module: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(module), *sys.path))}
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    hits = [list(map(int, process.communicate(timeout=120)[0].split())) for process in processes]
    # Each kernel was compiled by one process, and loaded by the two others.
    assert [sum(column) for column in zip(*hits, strict=True)] == [2, 2]


def test_what_was_compiled_of_other_files_is_not_used(module: Path) -> None:
    """A called function is in another file, which numba does not check."""
    helper, script = module / "some_helpers.py", module / "script.py"
    (module / "some_kernels.py").write_text(
        "from psdist.compression.kernel_runtime import IN, OUT, kernel\n"
        "from some_helpers import changed\n"
        "@kernel(IN, OUT)\n"
        "def change(values, out):\n"
        "    for i in range(values.size):\n"
        "        out[i] = changed(values[i])\n"
    )
    script.write_text(
        "import numpy as np, some_kernels\n"
        "out = np.zeros(1, np.float32)\n"
        "before = some_kernels.change.is_cached\n"
        "some_kernels.change(np.ones(1, np.float32), out)\n"
        "print(before, some_kernels.change.is_cached, out[0])\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(module), *sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    said = []
    for factor in (2, 2, 3):
        helper.write_text(
            "from psdist.compression.kernel_runtime import part_of_kernel\n"
            f"@part_of_kernel\ndef changed(value):\n    return {factor} * value\n"
        )
        said.append(subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=True))
    assert [one.stdout.split() for one in said] == [
        ["False", "True", "2.0"],
        ["True", "True", "2.0"],
        ["False", "True", "3.0"],
    ]


def test_a_cache_that_lacks_its_data_holds_nothing(module: Path) -> None:
    import some_kernels

    some_kernels.double.compile()
    assert some_kernels.double.is_cached and not some_kernels.triple.is_cached
    for path in module.glob("__pycache__/*.double-*.nbc"):
        path.unlink()
    assert not some_kernels.double.is_cached


def test_a_cache_without_room_does_without(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import some_kernels
    from numba.core.caching import IndexDataCacheFile

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    refused: list[object] = []
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", refuse)
    out = np.zeros(3, np.float32)
    some_kernels.double(np.arange(3, dtype=np.float32), out)
    assert out.tolist() == [0, 2, 4] and refused


def test_without_a_cache_there_is_no_lock(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import some_kernels

    def refuse(*arguments: object, cache: bool = False, **options: Any) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*arguments, **options)

    njit = numba.njit
    monkeypatch.setattr(numba, "njit", refuse)
    compile_all([some_kernels.double])
    assert not list(module.glob("**/*.lock"))
