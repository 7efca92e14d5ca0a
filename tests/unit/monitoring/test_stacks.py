"""Stacks of this process, and of one whose interpreter is held in a call of C code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from psdist.monitoring.stacks import Dump, cut, own_stacks
from psdist.wire.limits import STACKS_BYTES_MAX

_HOLDS = """
import ctypes, os, sys
from psdist.monitoring.stacks import prepare_dump
prepare_dump("run", "worker-0")
def hold_the_interpreter():
    print("held", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
hold_the_interpreter()
"""


async def inner(released: asyncio.Event) -> None:
    await released.wait()


async def outer(released: asyncio.Event) -> None:
    await inner(released)


async def test_threads_and_the_whole_chain_of_each_task_are_shown_once() -> None:
    started, ended, released = threading.Event(), threading.Event(), asyncio.Event()

    def stand_still() -> None:
        started.set()
        ended.wait()

    thread = threading.Thread(target=stand_still, name="the script")
    thread.start()
    started.wait()
    tasks = [asyncio.create_task(outer(released)) for _ in range(3)]
    await asyncio.sleep(0)
    found = own_stacks()
    ended.set()
    released.set()
    await asyncio.gather(*tasks)
    thread.join()
    assert "thread 'the script':\n" in found and "in stand_still\n    ended.wait()\n" in found
    assert "its event loop runs" in found
    assert found.count("task of outer and 2 more:\n") == found.count("in outer\n    await inner(released)\n") == 1
    assert found.count("in inner\n    await released.wait()\n") == 1, found


def test_long_stacks_are_cut_at_the_limit() -> None:
    assert cut("a\n") == "a\n"
    found = cut("ä" * STACKS_BYTES_MAX)
    assert len(found.encode()) <= STACKS_BYTES_MAX and found.endswith("(the rest is cut off)\n")


def test_a_process_that_holds_its_interpreter_writes_its_stacks() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            for run_id, member_id in (("run", "worker-1"), ("other", "worker-0")):
                with pytest.raises(LookupError):
                    Dump(process.pid, run_id, member_id)
            for _ in range(2):
                dump, found = Dump(process.pid, "run", "worker-0"), ""
                while not found:
                    found = dump.read()
                assert found.count("in hold_the_interpreter\n") == 1, found
            assert process.poll() is None
        finally:
            process.kill()


def test_no_process_without_prepared_memory_is_sent_the_signal() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with pytest.raises(LookupError):
            Dump(process.pid, "run", "worker-0")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
