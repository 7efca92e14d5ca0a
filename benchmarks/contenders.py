"""Starting contenders, letting them take turns, and ending them.

A contender is a few processes of its own, whose workers connect to the benchmark (``turns``). All are started before
the first turn and blocked between their turns. Their output goes to a file, which is shown if one of them fails. No
process is left behind: those that do not exit when the benchmark disconnects are killed with their group. If the
benchmark itself is killed, the kernel kills them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from benchmarks import turns

ROOT = Path(__file__).resolve().parents[1]
#: Environments of peers that psdist does not depend on; ignored by version control.
PEER_VENVS = ROOT / ".bench"

START_SECONDS = 180.0
TURN_SECONDS = 900.0
STOP_SECONDS = 30.0
WARM_STEPS = 3
DIRECTORY = "{directory}"
_LOG_CHARACTERS = 3000
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ContenderError(Exception):
    """Failure of a contender; the message ends with the output of its processes."""


@dataclass(frozen=True)
class Contender:
    """Description of a contender.

    workers: number of processes that connect and take turns; some may have no steps of their own.

    ``DIRECTORY`` in a word of a command is replaced by the directory that its processes share.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    workers: int
    environment: Mapping[str, str] = field(default_factory=dict)


def module(name: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command line of a module of this project."""
    return (python, "-m", name, *arguments)


@cache
def compile_kernels() -> None:
    """Compile psdist's kernels. Otherwise servers would do it beside their first steps, which are measured."""
    subprocess.run(module("psdist_server.kernels"), stdout=subprocess.DEVNULL, check=True)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, whatever ends that one."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Running:
    """Contender that was started, and is ended on leaving the block."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        self.facts: list[dict[str, Any]] = []
        self.directory = Path(tempfile.mkdtemp(prefix="psdist-bench-"))
        self._log = self.directory / "log"
        self._lines: list[turns.Line] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(contender)
        except BaseException:
            self.close()
            raise

    def _start(self, contender: Contender) -> None:
        compile_kernels()
        path = self.directory / "turns"
        # One thread per process, as torchrun does: the workers share the cores.
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | contender.environment | {turns.VARIABLE: str(path)}
        with turns.listen(path) as listener, self._log.open("wb") as log:
            for words in contender.commands:
                command = [word.replace(DIRECTORY, str(self.directory)) for word in words]
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, preexec_fn=_end_with_parent,
                    )
                )  # fmt: skip
            listener.settimeout(0.2)
            deadline = time.monotonic() + START_SECONDS
            while len(self._lines) < contender.workers:
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.settimeout(TURN_SECONDS)
                    self._lines.append(turns.Line(connection))
                    self.facts.append(self._receive(self._lines[-1]))
                if any(process.poll() is not None for process in self.processes):
                    raise self._failure("a process ended before the first turn")
                if time.monotonic() > deadline:
                    raise self._failure(f"{len(self._lines)} of {contender.workers} workers came in {START_SECONDS} s")

    def processor_seconds(self) -> float:
        """Processor time of all processes of this contender so far."""
        total = 0.0
        for started in self.processes:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(started.pid)
                for process in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        total += times.user + times.system
        return total

    def turn(self, steps: int) -> list[list[float]]:
        """Let all workers make ``steps`` steps; seconds by worker. Raises ContenderError."""
        orders = {number: {"steps": steps} for number in range(len(self._lines))}
        return [answer["seconds"] for answer in self.carry_out(orders)]

    def carry_out(self, orders: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Give workers, by their number, an order each, and returns their answers. Raises ContenderError."""
        for number, order in orders.items():
            try:
                self._lines[number].send(order)
            except OSError as error:
                raise self._failure(f"worker {number} ended: {error.strerror}") from None
        return [self._receive(self._lines[number]) for number in orders]

    def _receive(self, line: turns.Line) -> dict[str, Any]:
        try:
            answer = line.receive()
        except OSError as error:
            raise self._failure(str(error)) from None
        if answer is None:
            raise self._failure("a worker hung up")
        return dict(answer)

    def _failure(self, what: str) -> ContenderError:
        printed = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        return ContenderError(f"{self.name}: {what}; its processes printed:\n{printed}")

    def close(self) -> None:
        """End all processes. Closing again does nothing."""
        for line in self._lines:
            line.close()
        self._lines = []
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                # Processes that wait for turns exit immediately; these signals end the others.
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TakesTurns(Protocol):
    """The part of a contender that ``interleave`` needs."""

    name: str

    def turn(self, steps: int) -> list[list[float]]:
        """See ``Running.turn``."""


def interleave(running: Sequence[TakesTurns], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Return seconds by contender and round, the workers' together.

    The first step of a turn does not count: it wakes processes whose memory the others' turns evicted from the caches.
    The starting contender changes with the round.
    """
    times: dict[str, list[list[float]]] = {one.name: [] for one in running}
    for number in range(rounds):
        first = number % len(running)
        for one in (*running[first:], *running[:first]):
            by_worker = one.turn(steps + 1)
            times[one.name].append([second for seconds in by_worker for second in seconds[1:]])
    return times


def run_all(
    contenders: Sequence[Contender], rounds: int, steps: int
) -> tuple[dict[str, list[list[float]]], dict[str, list[dict[str, Any]]]]:
    """Start all, lets them warm up in one turn, interleaves them, and ends them.

    Returns seconds by contender and round, and the facts of each contender's workers. Raises ContenderError.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(Running(one)) for one in contenders]
        for one in running:
            one.turn(WARM_STEPS)
        return interleave(running, rounds, steps), {one.name: one.facts for one in running}
