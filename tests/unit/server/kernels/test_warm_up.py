"""Kernels are compiled by another process while numpy does their work; it ends with the server, however that ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import psutil
import pytest

from psdist.compression.compiled import Kernel
from psdist_server.kernels.warm_up import BackgroundCompiler

#: Begins to compile a kernel into a cache that is empty, and uses it at once.
_SCRIPT = """
import sys, threading
import numpy as np
from psdist import optim
from psdist_server.kernels import fused
from psdist_server.kernels.optimizers import Rule
from psdist_server.kernels.warm_up import BackgroundCompiler
from tests.support.fused_update import update

def step():
    weights = np.ones(3, np.float32)
    update(Rule(optim.SGD(lr=0.5)), weights, (), np.ones(3, np.float32), 0)
    assert weights.tolist() == [0.5] * 3

def settle():
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()

if "broken" in sys.argv:
    sys.executable = "/bin/false"
compiler = BackgroundCompiler()
assert not fused.sgd.is_cached
compiler.begin([fused.sgd], "sgd")
step()
print("is used", flush=True)
sys.stdin.readline()
if "close" in sys.argv:
    compiler.close()
settle()
step()
print(fused.sgd.is_cached, sum(fused.sgd.compile().stats.cache_hits.values()))
"""


def _script(path: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script, when its kernel was used once."""
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


@pytest.mark.long
def test_what_is_closed_compiles_no_more(tmp_path: Path) -> None:
    with _script(tmp_path, "close") as process:
        out, problems = process.communicate("\n")
    # Nothing is in the cache, unless the other process was faster.
    assert out in ("False 0\n", "True 1\n") and process.returncode == 0 and "ended with" not in problems, problems


def test_a_process_that_is_asked_to_end_leaves_nothing_to_compile_here(tmp_path: Path) -> None:
    """A launcher asks all processes of a server at once: it would compile for seconds instead of ending."""
    with _script(tmp_path) as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        compilers[0].terminate()
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("False 0\n", 0) and "ended with" not in problems, problems


@pytest.mark.long
def test_where_the_process_fails_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    with _script(tmp_path, "broken") as process:
        out, problems = process.communicate("\n")
    assert (out, process.returncode) == ("True 0\n", 0), problems
    assert "the process that compiles kernels ended with 1" in problems


def test_the_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with _script(tmp_path) as process:
        while not (compilers := psutil.Process(process.pid).children()):  # A thread starts it.
            pass
        process.kill()
    gone, alive = psutil.wait_procs(compilers, timeout=60)
    assert not alive and len(gone) == 1


class SlowKernel:
    """A kernel in the cache that is loaded once ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def interpret(self) -> None:
        """See ``Kernel``."""

    @property
    def is_cached(self) -> bool:
        return True

    def try_compile(self) -> bool:
        """See ``Kernel``."""
        return self.go.wait(60)


async def test_a_request_that_is_given_up_while_kernels_are_loaded_takes_no_other_with_it() -> None:
    """The others would be cancelled without a word, and their peers wait for answers that never come."""
    kernel, compiler = SlowKernel(), BackgroundCompiler()
    compiler.begin([cast(Kernel, kernel)], "a test")
    given_up, others = asyncio.create_task(compiler.loaded()), [asyncio.create_task(compiler.loaded()) for _ in "ab"]
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    later = asyncio.create_task(compiler.loaded())
    kernel.go.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*others, later) == [None, None, None]
    assert given_up.cancelled()
