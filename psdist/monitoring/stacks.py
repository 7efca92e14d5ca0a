"""Stacks of this process for ``psdist stacks``: its threads and asyncio tasks, as text without any values.

A member answers on its session. If its event loop does not run, as in a script that holds the interpreter in a call of
C code, the command reads the stacks on the member's own machine instead: a signal makes ``faulthandler`` write them,
without the interpreter, into memory that ``prepare_dump`` has opened. Its name in /proc tells whose it is, so that no
other process is sent the signal, which would end it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final

from psdist.wire.limits import STACK_FRAMES_MAX, STACKS_BYTES_MAX

#: A real-time signal: scripts and job schedulers use SIGUSR1 and SIGUSR2.
_SIGNAL: Final = signal.SIGRTMIN + 7
#: A process that has written nothing for this long has written all.
_QUIET_SECONDS: Final = 0.2
_ANSWERS: Final = "  its event loop runs, and answers this command\n"
_CUT: Final = "\n(the rest is cut off)\n"

#: Memory that the signal writes to; 0 before ``prepare_dump``.
_memory = 0


def own_stacks() -> str:
    """Return the stacks of all threads, and of the tasks of the running event loop; the innermost call comes last."""
    own, main = threading.get_ident(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    texts = [
        (f"thread {names.get(ident, str(ident))!r}", _ANSWERS if ident == own else _frames(_outwards(frame)))
        for ident, frame in frames
    ]
    current = asyncio.current_task()
    tasks = sorted((task for task in asyncio.all_tasks() if task is not current), key=asyncio.Task.get_name)
    texts += [(f"task {_task_name(task)}", _frames(_awaits(task.get_coro()))) for task in tasks]
    # Idle threads of a pool, and tasks of many connections, look the same.
    return cut("\n".join(f"{heading}:\n{stack}" for heading, stack in _grouped(texts)))


def _task_name(task: asyncio.Task[Any]) -> str:
    name, made = task.get_name(), getattr(task.get_coro(), "__qualname__", "")
    return f"of {made}" if name.startswith("Task-") else repr(name)


def _grouped(texts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headings with stacks. Those with the same stack are shown once, with their number."""
    texts = list(texts)
    counts = Counter(stack for _, stack in texts)
    first = {stack: heading for heading, stack in reversed(texts)}
    more = {stack: f" and {count - 1} more" if count > 1 else "" for stack, count in counts.items()}
    return [(f"{first[stack]}{more[stack]}", stack) for stack in counts]


def _outwards(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of a thread, the outermost first."""
    found = list(islice(traceback.walk_stack(frame), STACK_FRAMES_MAX))
    while found and found[-1][0].f_code.co_filename == threading.__file__:
        found.pop()  # The start of the thread.
    return found[::-1]


def _awaits(awaited: Any) -> list[tuple[FrameType, int]]:
    """Return the frames of a suspended coroutine, and of those that it waits for."""
    found: list[tuple[FrameType, int]] = []
    while awaited is not None and len(found) < STACK_FRAMES_MAX:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), "")
        frame: FrameType | None = getattr(awaited, f"{kind}_frame", None)
        if frame is None:
            break
        found.append((frame, frame.f_lineno))
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return found


def _frames(frames: list[tuple[FrameType, int]]) -> str:
    return "".join(traceback.StackSummary.extract(iter(frames)).format()) or "  no Python code\n"


def cut(text: str) -> str:
    """Return a text with at most ``STACKS_BYTES_MAX`` bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) <= STACKS_BYTES_MAX:
        return data.decode()
    return data[: STACKS_BYTES_MAX - len(_CUT)].decode("utf-8", "ignore") + _CUT


# --- without the interpreter ------------------------------------------------------------------------------------------


def prepare_dump(run_id: str, member_id: str) -> None:
    """Let ``dump_elsewhere`` have this process's stacks from now on. Does nothing if the signal has another use."""
    global _memory
    with suppress(OSError, AttributeError, ValueError, RuntimeError):  # Not Linux, or a sandbox.
        if not _memory and signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
            return
        memory = os.memfd_create(_name(run_id, member_id))
        faulthandler.register(_SIGNAL, file=memory, all_threads=True)
        if _memory:
            os.close(_memory)
        _memory = memory


def _name(run_id: str, member_id: str) -> str:
    return "psdist-stacks-" + hashlib.sha256(f"{run_id}\0{member_id}".encode()).hexdigest()[:32]


class Dump:
    """Stacks of a process of this machine, which the signal was sent to. Raises LookupError for any other process."""

    def __init__(self, pid: int, run_id: str, member_id: str) -> None:
        self._memory = _memory_of(pid, _name(run_id, member_id))
        self._before = self._size = os.stat(self._memory).st_size
        self._grown = time.monotonic()
        os.kill(pid, _SIGNAL)

    def read(self) -> str:
        """Return the stacks, empty until they are complete, which only the clock tells. Call it again and again."""
        size, now = os.stat(self._memory).st_size, time.monotonic()
        if size != self._size:
            self._size, self._grown = size, now
        if size == self._before or now - self._grown < _QUIET_SECONDS:
            return ""
        with open(self._memory, "rb") as file:
            file.seek(self._before)
            return cut(file.read(STACKS_BYTES_MAX + 1).decode("utf-8", "replace"))


def _memory_of(pid: int, name: str) -> str:
    """Return the path of a process's memory of this name. Raises LookupError."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry).startswith(f"/memfd:{name} "):
                    return str(entry)
    raise LookupError(name)
