"""A child process: spawned in its own session, its lines passed on, its descendants killed with it. Linux only.

A pidfd reports the exit while the child is still a zombie, so that its process group cannot have been reused when the
rest of the group is killed; asyncio's own child watchers reap too early for that. PR_SET_PDEATHSIG kills a child when
the launcher dies, and the reaper kills its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from psdist.launcher.events import ProcessKey
from psdist.machine import python
from psdist.wire.limits import OUTPUT_LINE_BYTES_MAX

_READ_BYTES: Final = 64 << 10
#: Longest time that output is read after the exit: a descendant outside the process group may hold the pipes open.
_DRAIN_SECONDS: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
#: Run as a file, by its own process: this one needs nothing of it.
_REAPER: Final = Path(__file__).with_name("reaper.py")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start: its command line and its whole environment.

    signals_group: True if SIGTERM also goes to its descendants, as for a shell script, which does not pass it on.
    descriptors: those that it inherits under the same numbers.
    terminal: True for a process to debug. It has this process's standard streams and, if they are a terminal, the
        keyboard: Ctrl-C is sent to it instead of to this process.
    """

    key: ProcessKey
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    signals_group: bool = False
    descriptors: tuple[int, ...] = ()
    terminal: bool = False


class Lifeline:
    """Pipe to child processes that end with this one, even if it is killed. They inherit ``end_of_children``. Only this
    process holds the other end: a process that it forks may outlive it."""

    def __init__(self) -> None:
        self.end_of_children, self.held = map(_above_standard_streams, os.pipe())
        _lifelines.add(self)

    def started(self) -> None:
        """Close the end of the children: all of them have inherited it."""
        os.close(self.end_of_children)

    def close(self) -> None:
        """Let the children end. A second call has no effect."""
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


#: Weak references, since a fork hook is never removed.
_lifelines: Final[weakref.WeakSet[Lifeline]] = weakref.WeakSet()


def _close_copies() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


os.register_at_fork(after_in_child=_close_copies)


def _above_standard_streams(descriptor: int) -> int:
    """Return the descriptor, or a duplicate if its number is that of a standard stream that this process was started
    without. A child would replace such a descriptor with its own standard stream."""
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


class LineSplitter:
    """Splitter of a byte stream into lines. Text after a carriage return replaces the text before it, as a progress bar
    does: the last state of a bar is its line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Add bytes. Returns the lines that are now complete, without their line ends."""
        # A trailing \r may be the first half of \r\n.
        *lines, rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        # Earlier states of a bar are over. The newest may have begun, or end in \r.
        self._rest = b"\r".join(rest.split(b"\r")[-2:])
        found = [_newest(line) for line in lines]
        while len(self._rest) > OUTPUT_LINE_BYTES_MAX:
            found.append(_newest(self._rest[:OUTPUT_LINE_BYTES_MAX]))
            self._rest = self._rest[OUTPUT_LINE_BYTES_MAX:]
        return found

    @property
    def bar(self) -> str:
        """The state of a progress bar that has not ended; empty without one."""
        return _newest(self._rest) if b"\r" in self._rest else ""

    def close(self) -> list[str]:
        """Return the unfinished line at the end of the stream."""
        rest, self._rest = _newest(self._rest), b""
        return [rest] if rest.strip() else []


def _newest(line: bytes) -> str:
    """Return the last state of a line."""
    states = [state for state in line.split(b"\r") if state]
    return states[-1].decode("utf-8", "replace") if states else ""


class Child:
    """A running process.

    on_lines: called with (stream, lines) for its output.
    on_exit: called last, with the return code.
    on_bar: called with the state of a progress bar in its output whenever it may have changed; empty once it has ended.
    inherited: a descriptor that the process inherits under the same number.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_lines: Callable[[int, list[str]], None],
        on_exit: Callable[[int], None],
        inherited: int | None = None,
        on_bar: Callable[[str], None] = lambda bar: None,
    ) -> None:
        self.spec = spec
        self._on_bar = on_bar
        #: State of a progress bar in each stream.
        self._bars: dict[int, str] = {}
        self._on_lines = on_lines
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._returncode: int | None = None
        descriptors = spec.descriptors if inherited is None else (*spec.descriptors, inherited)
        self._process = spawn(spec.argv, spec.environment, descriptors, terminal=spec.terminal)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._streams: dict[int, IO[bytes]] = {}
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            if stream is not None:
                self._read_stream(number, stream)

    def kill(self, signum: int) -> None:
        """Send a signal to the process. SIGKILL goes to its whole group; so do other signals if the spec says so."""
        # A script trains on after SIGTERM, so the processes of its data loaders must live: torch raises without them.
        send = os.killpg if self.spec.signals_group or signum == signal.SIGKILL else os.kill
        if self._returncode is None:
            with contextlib.suppress(OSError):
                send(self.pid, signum)

    @property
    def is_suspended(self) -> bool:
        """True if the process was stopped by a signal: not by a debugger."""
        with contextlib.suppress(OSError):
            # The name of the program, in parentheses, may contain anything.
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _read_stream(self, number: int, stream: IO[bytes]) -> None:
        descriptor, splitter = stream.fileno(), LineSplitter()
        os.set_blocking(descriptor, False)
        self._streams[number] = stream

        def readable() -> None:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            lines = splitter.feed(data) if data else splitter.close()
            # First, so that the last state of a bar is not shown above its line.
            self._bars[number] = splitter.bar
            self._on_bar(next(filter(None, self._bars.values()), ""))
            if lines:
                self._on_lines(number, lines)
            if not data:
                self._close(number)

        self._loop.add_reader(descriptor, readable)

    def _close(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._loop.remove_reader(stream.fileno())
            stream.close()
        self._finish_if_drained()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._returncode = self._process.wait()
        if self.spec.terminal:
            give_keyboard(os.getpgrp())
        self._drain_timer = self._loop.call_later(_DRAIN_SECONDS, self._stop_draining)
        self._finish_if_drained()

    def _stop_draining(self) -> None:
        for number in list(self._streams):
            self._close(number)

    def _finish_if_drained(self) -> None:
        if self._returncode is not None and not self._streams:
            self._drain_timer.cancel()
            self._on_exit(self._returncode)


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    inherited: tuple[int, ...] = (),
    stderr: int | None = subprocess.PIPE,
    *,
    terminal: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session that dies with this process. It has no input; its output is piped.

    inherited: descriptors that the process inherits under the same numbers.
    terminal: see ``ProcessSpec``. A terminal belongs to a session, so the process has a group of its own instead.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        if terminal:
            os.setpgid(0, 0)
            give_keyboard(os.getpgrp())
            # Nobody would continue it after Ctrl-Z: the shell knows this process alone.
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    return subprocess.Popen(
        list(argv),
        stdin=None if terminal else subprocess.DEVNULL,
        stdout=None if terminal else subprocess.PIPE,
        stderr=None if terminal else stderr,
        env=dict(environment),
        pass_fds=inherited,
        start_new_session=not terminal,
        # Safe here: the launcher has one thread, and the function only calls into libc.
        preexec_fn=die_with_parent,
    )


def give_keyboard(group: int) -> None:
    """Let a process group of this session read from the terminal, if standard input is one."""
    # A process in the background would be stopped by the call.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, before)


class ReaperProcess:
    """The launcher's side of the reaper, which tracks all process groups of the run."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [python(), "-I", "-S", str(_REAPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def add(self, group: int) -> None:
        """Add a process group, which must not outlive the launcher."""
        self._write(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """Remove a process group, which has ended."""
        self._write(b"-%d\n" % group)

    def close(self) -> None:
        """End the reaper, which kills the remaining groups."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # A run continues without its reaper, only less well protected.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
