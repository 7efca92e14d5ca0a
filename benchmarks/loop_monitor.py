"""Diagnosis of blocked event loops: duration of each long iteration of a process's loop, and where the time went.

Off unless the environment names a directory: ``PSDIST_LOOP_MONITOR=DIRECTORY``. ``tracing/sitecustomize.py`` then
installs it in each Python of a run that has ``benchmarks/tracing`` and this repository on its path. The loops of
schedulers, servers, launchers and workers append JSON lines to ``DIRECTORY/ROLE-PID.jsonl``: one at the start, and one
for each iteration longer than ``REPORT_SECONDS``. ``python -m benchmarks.blocking`` runs large models under it.

A callback on the loop measures the time since its previous call. While that call is overdue, a thread samples the
loop's stack. If the thread itself could not run, another thread held the interpreter lock, and it samples the stacks
of all others.

Lateness has three parts:

- *cpu*: processor time of the loop's thread; the loop did too much.
- *queued*: the kernel ran other threads; the machine is overloaded, and the loop is not to blame.
- *waited*: the rest, in system calls, locks, page faults that wait for the disk, or waiting for the interpreter lock.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TextIO
from weakref import WeakSet

VARIABLE: Final = "PSDIST_LOOP_MONITOR"
#: Iterations of at least this many seconds are reported.
REPORT_SECONDS: Final = 0.03
_TICK_SECONDS: Final = 0.005
_FRAMES: Final = 14
_STACKS: Final = 4


class _Usage(NamedTuple):
    """Seconds that a thread has run, and has waited for a processor."""

    cpu: float
    queued: float


class LoopMonitor:
    """Monitor of the current thread's event loop until the process ends. Reports long iterations to ``file``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: TextIO) -> None:
        self._loop = loop
        self._file = file
        self._thread = threading.get_ident()
        self._statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._usage = self._read_usage()
        self._ticked = time.monotonic()
        self._stacks: Counter[str] = Counter()
        self._holders: Counter[str] = Counter()
        self._write(started=time.time())
        threading.Thread(target=self._sample, name="loop-monitor", daemon=True).start()
        loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        usage, before = self._read_usage(), self._usage
        late = now - self._ticked - _TICK_SECONDS
        if late >= REPORT_SECONDS:
            cpu, queued = usage.cpu - before.cpu, usage.queued - before.queued
            self._write(
                at=time.time(),
                late=late,
                cpu=cpu,
                queued=queued,
                waited=max(0.0, late - cpu - queued),
                stacks=self._stacks.most_common(_STACKS),
                holders=self._holders.most_common(_STACKS),
            )
        self._stacks, self._holders = Counter(), Counter()
        self._usage, self._ticked = usage, now
        self._loop.call_later(_TICK_SECONDS, self._tick)

    def _sample(self) -> None:
        """Count the loop's stacks while it is late. Runs in its own thread until the loop is closed.

        Frames keep the arrays of their threads alive, so none are taken while the loop does not run.
        """
        slept = time.monotonic()
        while not self._loop.is_closed():
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if not self._loop.is_running():
                slept = now
                continue
            frames = sys._current_frames()
            if now - self._ticked > 3 * _TICK_SECONDS and (frame := frames.get(self._thread)) is not None:
                self._stacks[_text(frame)] += 1
            if now - slept > REPORT_SECONDS / 2:
                others = frames.keys() - {self._thread, threading.get_ident()}
                self._holders.update(_text(frames[one]) for one in others)
            del frames
            slept = time.monotonic()
        os.close(self._statistics)
        self._file.close()

    def _read_usage(self) -> _Usage:
        cpu, queued, _ = os.pread(self._statistics, 128, 0).split()
        return _Usage(int(cpu) / 1e9, int(queued) / 1e9)

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Monitor the event loops of this process if the environment asks for it and the process is part of a run. Call it
    before uvloop is imported."""
    directory, role, run = environ.get(VARIABLE, ""), _role(sys.orig_argv), asyncio._set_running_loop
    if not directory or not role:
        return
    watched = WeakSet[asyncio.AbstractEventLoop]()

    def set_running_loop(loop: asyncio.AbstractEventLoop | None) -> None:
        run(loop)
        if loop is not None and loop not in watched:
            watched.add(loop)
            file = Path(directory, f"{role}-{os.getpid()}.jsonl").open("a", encoding="utf-8")  # noqa: SIM115 - it stays open
            LoopMonitor(loop, file)

    # The loops of asyncio look it up here when they start, uvloop when it is imported.
    asyncio._set_running_loop = asyncio.events._set_running_loop = set_running_loop


def _role(command: Sequence[str]) -> str:
    """Return the first part of the file name; empty for a command that is no part of a run."""
    for module, role in (("psdist_scheduler", "scheduler"), ("psdist_server", "server")):
        if module in command:
            return role
    if "psdist.cli.main" in command:
        return "launcher" if "run" in command else ""
    return "worker"


def _text(frame: FrameType) -> str:
    """Return the innermost calls of a stack, the last one first."""
    return " < ".join(_calls(frame))


def _calls(frame: FrameType | None) -> Iterator[str]:
    for _ in range(_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f"{'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
