"""The monitor of blocked event loops: its reports, and the distinction between work and waiting."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loop_monitor import VARIABLE, LoopMonitor, install

#: Much longer than the reporting threshold.
BLOCK_SECONDS = 0.3


def work() -> None:
    """Use the processor for some time."""
    begin = time.thread_time()
    while time.thread_time() - begin < BLOCK_SECONDS:
        pass


def wait() -> None:
    """Wait for something that does not come."""
    threading.Event().wait(BLOCK_SECONDS)


def lines(directory: Path) -> list[str]:
    """Return the lines reported so far."""
    return [line for file in directory.glob("test-*.jsonl") for line in file.read_text().splitlines()]


async def reported(directory: Path, block: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the lines about a loop that ``block`` blocks."""
    loop, found = asyncio.get_running_loop(), asyncio.Event()
    LoopMonitor(loop, (directory / "test-1.jsonl").open("a", encoding="utf-8"))

    def look() -> None:
        if any(block.__name__ in line for line in lines(directory)):
            found.set()
        else:
            loop.call_later(0.01, look)

    loop.call_later(0.01, block)
    look()
    await found.wait()
    return [json.loads(line) for line in lines(directory)]


@pytest.mark.parametrize(("block", "part"), [(work, "cpu"), (wait, "waited")])
def test_a_blocked_turn_is_reported_with_its_stack_and_what_it_did(
    tmp_path: Path, block: Callable[[], None], part: str
) -> None:
    started, *turns = asyncio.run(reported(tmp_path, block))  # The monitor ends with its loop.
    assert started.keys() == {"started"}
    longest = max(turns, key=lambda turn: float(turn["late"]))
    assert longest["late"] > BLOCK_SECONDS / 2 and longest[part] > BLOCK_SECONDS / 2
    (stack, _), *_ = longest["stacks"]
    assert f" {block.__name__} < " in stack and "test_loop_monitor.py" in stack


def test_a_process_of_a_run_that_is_asked_to_is_monitored(tmp_path: Path) -> None:
    code = "from benchmarks.loop_monitor import install; install(); import uvloop, asyncio; {}.run(asyncio.sleep(0))"
    for loops in ("asyncio", "uvloop"):
        subprocess.run(
            [sys.executable, "-c", code.format(loops)], env={**os.environ, VARIABLE: str(tmp_path)}, check=True
        )
    assert [json.loads(file.read_text()).keys() for file in tmp_path.glob("worker-*.jsonl")] == [{"started"}] * 2


def test_without_the_variable_nothing_is_watched() -> None:
    before = asyncio._set_running_loop
    install({})
    assert asyncio._set_running_loop is before
