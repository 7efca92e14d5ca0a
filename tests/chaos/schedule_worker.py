"""Worker of ``group_schedules``: carries out its part of schedules, and reports each call's beginning and end.

Commands are lines of JSON on its input: first its rank in the run, then one schedule after another. Its reports are
lines of JSON on its output. Times are those of ``time.monotonic``, which all processes of a host share.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import psdist
from psdist.client.context import Context
from psdist.collectives.sync_group import Handle, WorkerGroup
from psdist.errors import DuplicateMemberError, PsdistError
from tests.chaos.schedule_draw import MESSAGES, Fault, Operation, Schedule, decode
from tests.simulation.group_calls import make_call

#: Calls that a rank makes after its first error: each must end with an error, too.
CALLS_AFTER_ERROR = 2


class ScriptError(Exception):
    """Error of a script, which ends its process."""


def report(event: str, **details: Any) -> None:
    """Write a report. One write, so that a reader gets all of it or nothing."""
    os.write(1, json.dumps({"event": event, "at": time.monotonic(), **details}).encode() + b"\n")


class Part:
    """One rank's part of a schedule."""

    def __init__(self, schedule: Schedule, group: WorkerGroup) -> None:
        self.schedule = schedule
        self.group = group
        self.rank = group.rank
        self.failed = False
        #: Asynchronous calls under way, and operations that come before the wait for each.
        self._started: list[tuple[Operation, Handle[Any] | PsdistError, Any, int]] = []
        self._is_interruptible = False
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_interrupt(self, *_: Any) -> None:
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def follow(self) -> None:
        """Make all calls, or those up to the first error and some more."""
        calls_left = CALLS_AFTER_ERROR
        for operation in self.schedule.operations:
            faults = self._begin_faults(operation)
            if self.rank not in operation.ranks or "omitted call" in faults:
                continue
            if self.failed:
                self._wait_for_started()
                if not calls_left:
                    break
                calls_left -= 1
            self._make(operation, faults)
            self._wait_for_started(operation.number)
        self._wait_for_started()
        self.group.close()
        report("done")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _begin_faults(self, operation: Operation) -> dict[str, Fault]:
        """Strike before an operation. Returns the faults of its call."""
        found = {}
        for number, fault in enumerate(self.schedule.faults):
            if (fault.rank, fault.operation, fault.moment) == (self.rank, operation.number, "before"):
                self._strike(number, fault)
                found[fault.kind] = fault
        return found

    def _strike(self, number: int, fault: Fault) -> None:
        if self.failed and fault.moment == "before":
            return
        report("strike", fault=number)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze" | "freeze briefly":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "late":
                threading.Event().wait(fault.seconds)
            case "close":
                self.group.close()
            case "end of script":
                raise ScriptError(f"rank {self.rank} ends its script")

    def _fail(self) -> None:
        if self.failed:
            return
        self.failed = True
        for number, fault in enumerate(self.schedule.faults):
            if fault.rank == self.rank and fault.moment == "own error":
                threading.Event().wait(fault.seconds)
                self._strike(number, fault)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _make(self, operation: Operation, faults: dict[str, Fault]) -> None:
        expected = self.schedule.expected(operation, self.rank)
        out = np.zeros_like(self.schedule.given(operation, self.rank) if expected is None else expected)
        given = self.schedule.given(operation, self.rank)
        lag = operation.lags[self.rank]

        def call() -> Any:
            report("begin", operation=operation.number, waits=not lag)
            return _call(self.group, operation, given, out, faults, asynchronous=lag > 0)

        if not lag:
            self._end(operation, call, expected)
            return
        handle: Handle[Any] = call()
        self._started.append((operation, handle, expected, operation.number + lag))

    def _wait_for_started(self, until: float = math.inf) -> None:
        """Wait for the asynchronous calls that are to end by an operation."""
        for entry in list(self._started):
            operation, handle, expected, latest = entry
            if latest <= until:
                self._started.remove(entry)
                report("wait", operation=operation.number)
                self._end(operation, handle.wait, expected)

    def _end(self, operation: Operation, wait: Any, expected: Any) -> None:
        """Wait for a call, and report its end."""
        number = operation.number
        try:
            try:
                self._is_interruptible = True
                result = wait()
            finally:
                self._is_interruptible = False
        except KeyboardInterrupt:
            report("end", operation=number, result="gave up")
            self.group.close()  # The call may have had its result already, and the group goes with the script.
            self._fail()
        except PsdistError as error:
            lost = int(error.details.get("rank", -1))
            text, kind = str(error)[:600], type(error).__name__
            report("end", operation=number, result="error", error=kind, text=text, lost=lost)
            self._fail()
        else:
            report("end", operation=number, result=_verdict(result, expected))


def _call(
    group: WorkerGroup, operation: Operation, given: Any, out: Any, faults: dict[str, Fault], *, asynchronous: bool
) -> Any:
    """Make a call of the group, or another one than the others if a fault wants that."""
    timeout = faults["time limit"].seconds if "time limit" in faults else None
    options: dict[str, Any] = {"async_op": asynchronous}
    kind = operation.kind
    if "other size" in faults:
        given, out = _longer(given), _longer(out)
    if "other dtype" in faults:
        given, out = given.astype(np.float64), out.astype(np.float64)
    if kind in MESSAGES and "other kind" not in faults:
        source, target = operation.ranks
        if group.rank == source:
            return group.send(given, target, operation.tag, timeout=timeout, **options)
        if kind == "message":
            return group.recv(out, source, operation.tag, timeout=timeout, **options)
        received = group.recv_any(out, operation.tag, timeout=timeout, **options)
        return _AnyMessage(received, source, out) if asynchronous else _checked_source(received, source, out)
    if "other kind" in faults or (kind == "barrier" and faults.keys() & {"other size", "other dtype"}):
        kind = "gather"
    return make_call(group, kind, given, out, timeout, **options)


class _AnyMessage:
    """Handle of a message of any source."""

    def __init__(self, handle: Handle[int], source: int, out: Any) -> None:
        self._handle, self._source, self._out = handle, source, out

    def wait(self) -> Any:
        """See ``Handle``."""
        return _checked_source(self._handle.wait(), self._source, self._out)


def _checked_source(found: int, source: int, out: Any) -> Any:
    return out if found == source else f"a message of rank {found}"


def _longer(array: Any) -> Any:
    return np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)


def _verdict(result: Any, expected: Any) -> str:
    """Return "right", or why a result is wrong."""
    if expected is None or (expected.size == 0 and result is None):
        return "right" if result is None else f"wrong: {result!r:.100}"
    if not isinstance(result, np.ndarray) or result.shape != expected.shape or result.dtype != expected.dtype:
        return f"wrong: {result!r:.100}"
    wrong = int((result != expected).sum())
    return f"wrong: {wrong} of {expected.size} elements" if wrong else "right"


def _join_run() -> Context:
    """Return the context of the run. A worker that was killed while stopped holds its rank until its lease ends."""
    while True:
        try:
            return psdist.init()
        except DuplicateMemberError:
            threading.Event().wait(0.1)


def main() -> None:
    """Follow schedules until the input ends."""
    line = sys.stdin.readline()
    if not line:
        return
    os.environ["RANK"] = str(json.loads(line))
    with _join_run() as context:
        report("ready")
        for text in sys.stdin:
            command = json.loads(text)
            schedule = decode(command["schedule"])
            group = context.join_group(command["name"], size=schedule.size, silence=schedule.silence)
            report("joined", rank=group.rank, ranks=group.ranks)
            sys.stdin.readline()  # All have joined.
            Part(schedule, group).follow()


if __name__ == "__main__":
    main()
