"""Kernels are compiled by another process while numpy does their work; that process ends with its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil
import pytest

from psdist.compression.kernel_runtime import BackgroundCompiler, Kernel

#: Starts to compile a kernel into an empty cache, and uses it immediately.
_SCRIPT = """
import logging, os, sys, threading
import numpy as np
from psdist.compression.kernel_runtime import BackgroundCompiler
from psdist.compression.casts import widen_brain

def step():
    out = np.empty(2, np.float32)
    widen_brain(np.array([0x3F80, 0xC000], np.uint16), out)
    assert out.tolist() == [1.0, -2.0]

def settle():
    for thread in threading.enumerate():
        if thread.name == "psdist-compile":
            thread.join()

if "broken" in sys.argv:
    os.environ["PSDIST_PYTHON"] = "/bin/false"
if "stuck" in sys.argv:
    os.environ["PSDIST_PYTHON"] = sys.argv[2]
compiler = BackgroundCompiler(logging.getLogger("psdist"))
assert not widen_brain.is_cached
compiler.add([widen_brain], "payloads")
step()
compiler.start_compiling()
print("is used", flush=True)
sys.stdin.readline()
if "exit" in sys.argv:
    sys.exit()
if "close" in sys.argv:
    compiler.close()
settle()
if "again" in sys.argv:
    compiler.add([widen_brain], "payloads")
    settle()
step()
print(widen_brain.is_cached, sum(widen_brain.compile().stats.cache_hits.values()))
"""


def _script(path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Return the script after its first use of the kernel."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(path)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "is used\n"
    return process


def test_another_process_compiles(tmp_path: Path) -> None:
    with _script(tmp_path) as process:
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("True 1\n", 0), problems


def test_runs_that_end_before_their_compiler_do_not_each_claim_to_be_the_first(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    said = []
    for _ in range(3):
        with _script(tmp_path / "cache", "stuck", str(stuck), "exit") as process:
            assert process.stderr is not None
            said.append(process.stderr.readline())
            process.communicate("\n")
    assert said[0].startswith("compiling kernels for payloads (once on this machine"), said
    assert all(line.startswith("still compiling kernels for payloads (earlier runs ended") for line in said[1:]), said


@pytest.mark.long
def test_what_is_closed_compiles_no_more(tmp_path: Path) -> None:
    with _script(tmp_path, "close") as process:
        out, problems = process.communicate("\n")
    # Nothing is cached, unless the other process was faster.
    assert out in ("False 0\n", "True 1\n") and process.returncode == 0 and "ended with" not in problems, problems


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_end_leaves_nothing_to_compile_here(tmp_path: Path, number: signal.Signals) -> None:
    """A launcher signals all processes of a server together.

    Otherwise this process would compile for seconds instead of ending. The compiler is signalled while it compiles,
    not before it has started.
    """
    with _script(tmp_path) as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        while compilers[0].nice() == 0:
            pass
        compilers[0].send_signal(number)
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("False 0\n", 0) and "ended with" not in problems, problems


@pytest.mark.long
def test_kernels_whose_compiler_was_asked_to_end_are_compiled_for_who_comes_next(tmp_path: Path) -> None:
    with _script(tmp_path, "again") as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        compilers[0].terminate()
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("True 1\n", 0), problems


@pytest.mark.long
def test_where_the_process_fails_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    with _script(tmp_path, "broken") as process:
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("True 0\n", 0), problems
    assert "compiler of kernels ended with 1" in problems


@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_a_script_that_ends_does_not_wait_for_the_process(tmp_path: Path, how: str) -> None:
    """The compiler process is stopped here, unless its parent kills it."""
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    stuck.chmod(0o700)
    with _script(tmp_path, "stuck", str(stuck), how) as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        out, problems = process.communicate("\n")
    assert out == "" and "ended with" not in problems, problems
    assert process.returncode == (0 if how == "exit" else -signal.SIGINT)
    assert not any(compiler.is_running() for compiler in compilers)


def test_the_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with _script(tmp_path) as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        process.kill()
    gone, alive = psutil.wait_procs(compilers, timeout=60)
    assert not alive and len(gone) == 1


class SlowKernel:
    """Kernel in the cache that is loaded once ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def interpret(self, spent: Callable[[float], None]) -> None:
        """See ``Kernel``."""

    @property
    def is_cached(self) -> bool:
        return True

    def try_compile(self) -> bool:
        """See ``Kernel``."""
        return self.go.wait(60)


async def test_a_request_that_is_given_up_while_kernels_are_loaded_takes_no_other_with_it() -> None:
    """Otherwise the others would be cancelled silently, and their peers would wait forever."""
    kernel, compiler = SlowKernel(), BackgroundCompiler(logging.getLogger("psdist"))
    compiler.add([cast(Kernel, kernel)], "a test")
    compiler.start_compiling()
    given_up, others = asyncio.create_task(compiler.loaded()), [asyncio.create_task(compiler.loaded()) for _ in "ab"]
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    later = asyncio.create_task(compiler.loaded())
    kernel.go.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*others, later) == [None, None, None]
    assert given_up.cancelled()


class MeteredKernel(SlowKernel):
    """Kernel in the cache that reports the time of its calls."""

    def interpret(self, spent: Callable[[float], None]) -> None:
        """See ``Kernel``."""
        self.spent = spent

    def try_compile(self) -> bool:
        """See ``Kernel``."""
        self.go.set()
        return True


def test_kernels_are_loaded_once_they_took_long_and_those_that_come_later_at_once() -> None:
    first, second, later = MeteredKernel(), MeteredKernel(), MeteredKernel()
    compiler = BackgroundCompiler(logging.getLogger("psdist"))
    compiler.add([cast(Kernel, first)], "a test")
    compiler.add([cast(Kernel, second)], "another")
    first.spent(0.1)
    assert not compiler._loading
    second.spent(0.11)
    assert first.go.wait(60) and second.go.wait(60)
    compiler.add([cast(Kernel, later)], "what comes later")
    assert later.go.wait(60)


def test_the_kernels_of_an_optimizer_are_loaded_first() -> None:
    order: list[str] = []

    class Noted(MeteredKernel):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def try_compile(self) -> bool:
            order.append(self._name)
            return True

    compiler = BackgroundCompiler(logging.getLogger("psdist"))
    compiler.add([cast(Kernel, Noted("others"))], "all optimizers")
    compiler.add([cast(Kernel, Noted("adam"))], "adam")
    compiler.start_compiling()
    for thread in threading.enumerate():
        if thread.name == "psdist-compile":
            thread.join()
    assert order == ["adam", "others"]


def test_two_groups_are_announced_in_one_calm_line(tmp_path: Path) -> None:
    stuck = tmp_path / "slow"
    stuck.write_text("#!/bin/sh\nsleep 1.5\n")  # Longer than until the line is due; nothing is compiled.
    stuck.chmod(0o755)
    script = """
import logging, os, sys, threading
from psdist.compression.casts import widen_brain, widen_half
from psdist.compression.kernel_runtime import BackgroundCompiler
os.environ["PSDIST_PYTHON"] = sys.argv[1]
logging.basicConfig(format="%(levelname)s %(message)s")
compiler = BackgroundCompiler(logging.getLogger("psdist"))
compiler.add([widen_brain], "all optimizers")
compiler.add([widen_half], "adam")
compiler.start_compiling()
for thread in threading.enumerate():
    if thread.name == "psdist-compile":
        thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(stuck)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert line.startswith("NOTICE compiling kernels for adam (once on this machine")


def test_kernels_that_several_want_are_compiled_once() -> None:
    kernel, compiler = SlowKernel(), BackgroundCompiler(logging.getLogger("psdist"))
    compiler.start_compiling()
    before = set(threading.enumerate())
    try:
        for purpose in ("one parameter set", "another one", "a third one"):
            compiler.add([cast(Kernel, kernel)], purpose)
        (compiling,) = (one for one in set(threading.enumerate()) - before if one.name == "psdist-compile")
    finally:
        kernel.go.set()
    compiling.join()


def test_where_numba_is_broken_numpy_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MeteredKernel):
        @property
        def is_cached(self) -> bool:
            raise ImportError("numba needs another NumPy")

    compiler = BackgroundCompiler(logging.getLogger("psdist"))
    compiler.add([cast(Kernel, Broken())], "a test")
    with caplog.at_level(logging.WARNING, "psdist"):
        compiler.start_compiling()
        for thread in threading.enumerate():
            if thread.name == "psdist-compile":
                thread.join()
    assert "kernels for a test cannot be compiled and stay slow: ImportError" in caplog.text


#: Compiles before and after LLVM's pages are returned, and prints how many bytes are in memory each time.
_RELEASES = """
import numba, psutil
from psdist.compression.kernel_runtime import release_compiler

def resident():
    maps = psutil.Process().memory_maps(grouped=False)
    clean = [one for one in maps if "libllvmlite" in one.path and "w" not in one.perms and not one.anonymous]
    return sum(one.rss for one in clean)

assert numba.njit(lambda x: x + 1)(1) == 2
before = resident()
release_compiler()
after = resident()
assert numba.njit(lambda x: x * 3)(2) == 6
print(before, after)
"""


def test_a_compiler_that_gave_its_pages_back_compiles_again() -> None:
    done = subprocess.run([sys.executable, "-c", _RELEASES], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 8_000_000 and after == 0
