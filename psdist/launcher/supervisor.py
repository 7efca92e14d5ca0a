"""Machine that decides how a run reacts to exits of its processes. Pure: events in, effects out, ``now`` an argument.

During the run:

* A failed worker is restarted with its rank, up to ``restarts_max`` times. It is not restarted if its settings are
  wrong, if its first start ended by itself before it had connected, if the program text is wrong, or if two starts
  in a row raised the same exception before their first step: every restart would end the same way. Then
  everything is stopped, and the first worker that was not restarted is the *cause*: the run ends with its status.
* In an elastic run the other workers continue instead. The run succeeds if one of them does; otherwise the first one
  that failed is the cause. In every run, a worker that joined too late to take part is left out in the same way.
* A worker is not restarted if its process group of all workers has a member that has succeeded, and if one succeeds
  meanwhile it is the cause: it would wait for that member forever.
* A worker that succeeds without ever having connected is the cause if a connected worker is running, which would wait
  for it forever.
* The scheduler is restarted, and so is a server whose shards survive in other copies or in a snapshot (``durable``). A
  process that exits on its own ``QUICK_DEATHS_ALLOWED`` times in a row, each time soon after its start, is the cause.
  Without a copy, a server that fails is the cause; one that succeeds has handed its shards over. A scheduler or server
  that rejects its settings, or cannot start with them, is the cause immediately.
* The scheduler requests servers to be started and drained ones to be stopped (``ServerScaling``). The same holds for
  workers (``WorkerScaling``): a stopped worker ends in order, after its push.
* A process that is stopped (SIGSTOP) for too long is killed, and counts as failed: nobody else can end it, and workers
  that the scheduler has expelled would be awaited forever.
* A worker that has the terminal, for its debugger, ends the run if the debugger was left, or by Ctrl-C, which goes to
  this worker instead of the launcher.
* When all workers have succeeded, the run does. It is said if none of them pushed, or if they made different numbers
  of steps, so that some trained without the others (``notice_of_steps``).

``shutdown`` describes how everything is stopped then. No snapshot is taken if servers or the scheduler are the cause.
The user's first signal starts the shutdown; it changes nothing if one is already running. A second one kills all
processes immediately and skips the snapshot, unless it arrives within ``REPEAT_SECONDS`` of the first: then it counts
as a repeat and is ignored. Nothing that happens during the shutdown changes the cause.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from typing import Final

from psdist.launcher.events import (
    Connected,
    Effect,
    Event,
    Exited,
    Finish,
    Interrupted,
    Kill,
    ProcessKey,
    ProcessTable,
    RunFailed,
    RunningProcess,
    Say,
    ServersWanted,
    Start,
    TimePassed,
    WorkersWanted,
    describe,
    enumerate_keys,
    status_of,
)
from psdist.launcher.shutdown import STOP_ORDER, RunPolicy, Shutdown
from psdist.settings import exit_codes

#: A server or scheduler that exits this many times in a row, each within QUICK_SECONDS of its start, is given up.
QUICK_DEATHS_ALLOWED: Final = 5
QUICK_SECONDS: Final = 10.0
#: One stop may arrive several times: ``timeout`` signals its child, and then the group that the child is in.
REPEAT_SECONDS: Final = 1.0
#: Rate limit for servers started while a run trains: many together would take the processor from it, and could not be
#: cancelled.
STARTS_AT_ONCE: Final = 4
STARTS_SECONDS: Final = 1.0
#: Longest time between two looks at the processes that counts as a time in which one of them was stopped.
LONGEST_LOOK_SECONDS: Final = 2.0
#: Exit statuses that every attempt of a worker would end with, and the explanation that is printed.
_RECURRING: Final = {
    exit_codes.CONFIGURATION: " (wrong settings or use of psdist: not restarted)",
    exit_codes.LATE: " (training that it cannot join had begun: not restarted)",
    exit_codes.INFRASTRUCTURE: " (the run cannot continue: not restarted)",
    exit_codes.NEVER_CONNECTED: " (the run ended before it had started: not restarted)",
}
_BEFORE_CONNECTING: Final = " (it failed before psdist.init() had connected, as it would again: not restarted)"
_CERTAIN: Final = " (an error of the script itself, before its first step: not restarted)"
_REPEATED: Final = " (the same error as in the attempt before, before its first step: not restarted)"
#: Signals that come from outside: they do not predict how soon the process ends after its next start.
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
#: Signals by which a process ends itself, as of a library that does not fit this machine.
_CRASHES: Final = (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGFPE, -signal.SIGBUS, -signal.SIGABRT)


class StoppingProcesses:
    """Processes that were sent SIGTERM because fewer are wanted, with the time at which each is killed.

    Invariant: such a process stays in the table of processes until it has ended.
    """

    def __init__(self) -> None:
        self._deadlines: dict[ProcessKey, float] = {}

    @property
    def keys(self) -> set[ProcessKey]:
        """Processes that have not ended yet."""
        return set(self._deadlines)

    def stop(self, key: ProcessKey, deadline: float, text: str) -> list[Effect]:
        """Send SIGTERM to a process, and SIGKILL at ``deadline``. text: message for people."""
        self._deadlines[key] = deadline
        return [Say(f"{key} {text}"), Kill(key, signal.SIGTERM)]

    def has_stopped(self, key: ProcessKey) -> bool:
        """Return True if the process that ended was being stopped, and forget it."""
        return self._deadlines.pop(key, None) is not None

    def on_time(self, now: float) -> list[Effect]:
        """Kill the processes that are past their deadline."""
        late = [key for key, deadline in self._deadlines.items() if now >= deadline]
        self._deadlines |= dict.fromkeys(late, math.inf)
        return [Kill(key, signal.SIGKILL) for key in late]


class SuspendedProcesses:
    """Processes that are stopped, as by SIGSTOP. Time in which this process did not look does not count, because it may
    have been stopped with them."""

    def __init__(self, policy: RunPolicy) -> None:
        self._policy = policy
        #: Seconds for which each has been seen stopped, and the time of the last look.
        self._seconds: dict[ProcessKey, float] = {}
        self._looked = math.inf

    def on_time(self, suspended: Iterable[ProcessKey], now: float) -> list[Effect]:
        """Kill those that are stopped for too long."""
        passed, self._looked = min(max(now - self._looked, 0.0), LONGEST_LOOK_SECONDS), now
        self._seconds = {key: self._seconds.get(key, -passed) + passed for key in suspended}
        late = [key for key, seconds in self._seconds.items() if seconds >= self._limit(key)]
        self._seconds |= dict.fromkeys(late, -math.inf)
        return [effect for key in late for effect in self._end(key)]

    def _limit(self, key: ProcessKey) -> float:
        policy = self._policy
        return policy.worker_suspended_seconds if key.role == "worker" else policy.service_suspended_seconds

    def _end(self, key: ProcessKey) -> list[Effect]:
        said = f"{key} has been stopped for {self._limit(key):g} s, as by SIGSTOP: its process is killed"
        return [Say(said), Kill(key, signal.SIGKILL)]


class ServerScaling:
    """Controller that starts the servers that the scheduler wants, a few at a time, and stops drained ones. A stopped
    server's number is not reused.

    Invariant: Only the newest request of the scheduler counts; starts left over from an earlier one are dropped.
    """

    def __init__(self, table: ProcessTable, stopping: StoppingProcesses, grace_seconds: float) -> None:
        self._table = table
        self._stopping = stopping
        self._grace_seconds = grace_seconds
        self._next_number = len(table.with_role("server"))
        #: The request that servers are still being started for, and when the next ones may be started.
        self._pending: ServersWanted | None = None
        self._next_start = -math.inf

    def on_wanted(self, event: ServersWanted, now: float) -> list[Effect]:
        """Start and stop servers as the scheduler wants."""
        effects: list[Effect] = []
        for key in (ProcessKey("server", number) for number in event.stop):
            if key in self._table and key not in self._stopping.keys:
                effects += self._stopping.stop(key, now + self._grace_seconds, "holds nothing: stopped")
        self._pending = event
        return effects + self.on_time(now)

    def on_time(self, now: float) -> list[Effect]:
        """Start the next servers that are missing."""
        event = self._pending
        if event is None or now < self._next_start:
            return []
        leaving = self._stopping.keys.union(ProcessKey("server", number) for number in event.draining)
        missing = event.servers - len(self._table.with_role("server").keys() - leaving)
        if missing <= STARTS_AT_ONCE:
            self._pending = None
        else:
            self._next_start = now + STARTS_SECONDS
        effects: list[Effect] = []
        for _ in range(min(missing, STARTS_AT_ONCE)):
            key = ProcessKey("server", self._next_number)
            self._next_number += 1
            self._table.start(key, RunningProcess(now))
            effects += [Say(f"{key} is started: {event.servers} servers are wanted"), Start(key, 0)]
        return effects


class WorkerScaling:
    """Controller that starts workers, or stops those of the highest ranks, when a different number of them is wanted.
    Workers that end on their own are not replaced."""

    def __init__(self, table: ProcessTable, stopping: StoppingProcesses, stop_timeout_seconds: float) -> None:
        self._table = table
        self._stopping = stopping
        self._stop_timeout_seconds = stop_timeout_seconds
        self._wanted = 0

    def on_wanted(self, event: WorkersWanted, now: float) -> list[Effect]:
        """Start and stop workers. Repeating a number is a no-op: workers that finished are not replaced."""
        if event.workers == self._wanted:
            return []
        self._wanted = event.workers
        active = sorted(self._table.with_role("worker").keys() - self._stopping.keys)
        first = max([event.next_rank, *(key.number + 1 for key in self._table.with_role("worker"))])
        effects: list[Effect] = []
        for rank in range(first, first + event.workers - len(active)):
            key = ProcessKey("worker", rank)
            self._table.start(key, RunningProcess(now))
            effects += [Say(f"{key} is started: {event.workers} workers are wanted"), Start(key, 0)]
        for key in active[event.workers :]:
            deadline = now + self._stop_timeout_seconds
            effects += self._stopping.stop(key, deadline, f"is stopped: {event.workers} workers are wanted")
        return effects


class Supervisor:
    """The state of one run. Every process in ``keys`` counts as started at ``now``; ``table`` lists the running
    ones."""

    def __init__(self, keys: Iterable[ProcessKey], policy: RunPolicy, now: float = 0.0) -> None:
        self._policy = policy
        self.table = ProcessTable(keys, now)
        self._stopping = StoppingProcesses()
        self._suspended = SuspendedProcesses(policy)
        self._servers = ServerScaling(self.table, self._stopping, policy.grace_seconds)
        self._workers = WorkerScaling(self.table, self._stopping, policy.stop_timeout_seconds)
        self._shutdown = Shutdown(self.table, policy)
        #: Workers that succeeded without having connected, in the order of their exits.
        self._unconnected: list[ProcessKey] = []
        #: Reported steps of the workers that succeeded; None for one that reported none.
        self._steps: dict[ProcessKey, Mapping[str, int] | None] = {}
        #: The first worker that succeeded as a member of a process group of all workers.
        self._left_group: ProcessKey | None = None
        #: When the first signal came.
        self._interrupted_at: float | None = None
        #: Elastic: the first worker that failed for good, and True if another one succeeded.
        self._first_failure: Finish | None = None
        self._succeeded = False

    @property
    def stopping(self) -> bool:
        """True if the run is ending."""
        return self._shutdown.is_under_way

    def waiting_to_connect(self) -> list[tuple[ProcessKey, int]]:
        """Return the running workers that have not connected, with their attempt."""
        workers = self.table.with_role("worker").items()
        return [(key, worker.attempt) for key, worker in workers if not worker.connected]

    def on(self, event: Event, now: float) -> list[Effect]:
        """Process an event and return the effects to carry out, in this order."""
        match event:
            case Exited():
                return self._exited(event, now)
            case Connected(key):
                self.table.connect(key)
                return [] if self.stopping else self._check_unconnected(now)
            case Interrupted(signum):
                return self._on_signal(signum, now)
            case RunFailed(message, status, key):
                return [] if self.stopping else self._give_up(Finish(status, message, key), now)
            case ServersWanted():
                return [] if self.stopping else self._servers.on_wanted(event, now)
            case WorkersWanted():
                return (
                    [] if self.stopping or not self.table.with_role("worker") else self._workers.on_wanted(event, now)
                )
            case TimePassed() if self.stopping:
                return self._shutdown.on_time(now)
            case TimePassed(suspended):
                killed = self._suspended.on_time(suspended, now)
                return self._stopping.on_time(now) + self._servers.on_time(now) + killed

    def _exited(self, event: Exited, now: float) -> list[Effect]:
        process = self.table.remove(event.key)
        if event.connected:
            self.table.connect(event.key)
        if self.stopping:
            return self._shutdown.on_exited(event, now)
        if self._stopping.has_stopped(event.key):
            return self._check_all_ended(now) if event.key.role == "worker" else []
        if event.key.role != "worker":
            return self._service_exited(event, process, now)
        if event.returncode != 0:
            return self._worker_failed(event, process, now)
        self._succeeded = True
        self._steps[event.key] = event.steps
        if not (process.connected or event.connected):
            self._unconnected.append(event.key)
        if event.group_age is not None:
            self._left_group = self._left_group or event.key
            if waiting := self._check_group(now - event.group_age, now):
                return waiting
        return self._check_unconnected(now) or self._check_all_ended(now)

    def _service_exited(self, event: Exited, process: RunningProcess, now: float) -> list[Effect]:
        key = event.key
        how = f"{key} {'died' if event.returncode else 'ended'}: {describe(event.returncode)}"
        is_refused = event.returncode == exit_codes.CONFIGURATION and process.attempt == 0
        if key.role == "server" and (is_refused or event.returncode == exit_codes.USAGE):
            return self._give_up(Finish(event.returncode, f"{key} cannot begin", key), now)
        if key.role == "server" and not self._policy.durable and event.returncode != 0:
            remedy = "start the run again (--replicas 2, or snapshots, survive this)"
            lost = f"{how}; the only copy of its shards is lost: {remedy}"
            return self._give_up(Finish(exit_codes.INFRASTRUCTURE, lost, key), now)
        if key.role == "scheduler" and _cannot_begin(event.returncode, process.attempt):
            return self._give_up(Finish(event.returncode, "the scheduler cannot begin", key), now)
        quick = event.returncode not in _FROM_OUTSIDE and now - process.started < QUICK_SECONDS
        deaths = process.quick_deaths + 1 if quick else 0
        if deaths == QUICK_DEATHS_ALLOWED:
            given_up = f"{how}; the last of {deaths} exits in a row within {QUICK_SECONDS:g} s of its start"
            return self._give_up(Finish(exit_codes.INFRASTRUCTURE, given_up, key), now)
        self.table.start(key, RunningProcess(now, process.attempt + 1, quick_deaths=deaths))
        what = "the run continues, and it is restarted"
        if key.role == "server" and event.returncode != 0 and not self._policy.copies:
            what = "it is restarted; its shards come from the last snapshot, if there is one"
        return [Say(f"{how}; {what}"), Start(key, process.attempt + 1)]

    def _worker_failed(self, event: Exited, process: RunningProcess, now: float) -> list[Effect]:
        if event.key == self._policy.debugged:
            if event.error == exit_codes.DEBUGGER_LEFT:
                left = f"the debugger of {event.key} was left: the run ends"
                return self._shutdown.start(Finish(exit_codes.FAILURE, left, event.key), now)
            if event.returncode == -signal.SIGINT:  # Ctrl-C goes to the worker that has the terminal.
                return self._on_signal(signal.SIGINT, now)
        how, most = describe(event.returncode), self._policy.restarts_max
        recurs = _why_it_recurs(event, process)
        if event.group_age is not None and self._left_group is not None:
            recurs = recurs or f" ({self._cannot_rejoin(self._left_group)})"
        if process.attempt < most and not recurs:
            attempt = process.attempt + 1
            grouped = event.group_age is not None
            again = RunningProcess(now, attempt, last_error=event.error, was_grouped=grouped)
            self.table.start(event.key, again)
            return [Say(f"{event.key} failed: {how}; restart {attempt} of {most}"), Start(event.key, attempt)]
        tried = recurs or (f" (--max-restarts {most} used up)" if most else "")
        cause = Finish(status_of(event.returncode), f"{event.key} failed: {how}{tried}", event.key)
        is_late = event.returncode == exit_codes.LATE
        if not (self._policy.elastic or is_late):
            return self._shutdown.start(cause, now)
        self._first_failure = self._first_failure or cause
        if others := self.table.with_role("worker"):
            why = "" if is_late else "the run is elastic, so "
            return [Say(f"{cause.message}; {why}others continue: {enumerate_keys(others)}")]
        # A failed run prints its cause at the end anyway.
        is_cause = self._first_failure is cause and not self._succeeded
        return [*(() if is_cause else (Say(cause.message),)), *self._check_all_ended(now)]

    def _on_signal(self, signum: int, now: float) -> list[Effect]:
        name = signal.Signals(signum).name
        if self._interrupted_at is not None:
            if now < self._interrupted_at + REPEAT_SECONDS:
                return []
            lost = "; progress since the last snapshot is not saved" if self._shutdown.snapshot_is_ahead else ""
            self._shutdown.leave_snapshot_out()
            kills = [Kill(key, signal.SIGKILL) for role in STOP_ORDER for key in self.table.with_role(role)]
            return [Say(f"{name} again: all processes are killed{lost}"), *kills]
        self._interrupted_at = now
        if self.stopping:
            return [Say(f"{name}: the run is already ending; repeat the signal to kill its processes")]
        said = Say(f"{name}: stopping all processes; repeat the signal to kill them")
        return [said, *self._shutdown.start(Finish(exit_codes.SIGNAL_BASE + signum), now)]

    @staticmethod
    def _cannot_rejoin(member: ProcessKey) -> str:
        return f"its torch.distributed group needs {member}, which has ended: not restarted"

    def _check_group(self, made: float, now: float) -> list[Effect]:
        """Give up a restarted worker that waits for a group which a member has left that made it at time ``made``."""
        for key, worker in self.table.with_role("worker").items():
            if worker.was_grouped and worker.started > made and self._left_group is not None:
                message = f"{key} failed before, and cannot continue: {self._cannot_rejoin(self._left_group)}"
                return self._shutdown.start(Finish(exit_codes.FAILURE, message, key), now)
        return []

    def _check_unconnected(self, now: float) -> list[Effect]:
        waiting = [key for key, worker in self.table.with_role("worker").items() if worker.connected]
        if not self._unconnected or not waiting:
            return []
        culprit = self._unconnected[0]
        message = (
            f"{culprit} ended without connecting to psdist, while {enumerate_keys(waiting)} waits for it: every "
            "worker's script must call psdist.init() or psdist.Client()"
        )
        return self._shutdown.start(Finish(exit_codes.NEVER_CONNECTED, message, culprit), now)

    def _check_all_ended(self, now: float) -> list[Effect]:
        if self.table.with_role("worker"):
            return []
        if self._first_failure is not None and not self._succeeded:
            return self._shutdown.start(self._first_failure, now)
        said: list[Effect] = []
        if not self.table.ever_connected:
            said.append(Say("warning: the script never used psdist: no worker called psdist.init() or psdist.Client()"))
        elif notice := notice_of_steps(self._steps):
            said.append(Say(f"warning: {notice}"))
        return said + self._shutdown.start(Finish(exit_codes.OK), now)

    def _give_up(self, end: Finish, now: float) -> list[Effect]:
        """Stop because servers or the scheduler do not work: nothing can be saved."""
        self._shutdown.leave_snapshot_out()
        return self._shutdown.start(end, now)


def notice_of_steps(reports: Mapping[ProcessKey, Mapping[str, int] | None]) -> str:
    """Return a warning about the steps that workers reported; empty if all are as expected.

    Steps of BSP are numbered alike on all workers. Counts that differ by one are a last batch of some.
    """
    known = {key: steps for key, steps in reports.items() if steps is not None}
    if known and len(known) == len(reports) and not any(known.values()):
        return (
            "no worker pushed, so nothing was trained: call push_pull() of the parameters, or step() of the optimizer, "
            "in the training loop"
        )
    idle = [key for key, steps in known.items() if not steps]
    if idle and any(known.values()):
        return (
            f"{enumerate_keys(idle)} never pushed, and the others trained alone: every worker's script must make the "
            "same steps"
        )
    for name in dict.fromkeys(name for steps in known.values() for name in steps):
        counts = sorted(((steps[name], key) for key, steps in known.items() if name in steps), reverse=True)
        (most, last), (least, first) = counts[0], counts[-1]
        if most > least + 1:
            return (
                f"{first} ended after step {least} of {name!r}, and {last} after step {most}: later steps are those of "
                "the remaining workers alone. After a restart a loop over range(n) makes n more steps: count by the "
                "step instead (docs/loops.md)"
            )
    return ""


def _why_it_recurs(event: Exited, process: RunningProcess) -> str:
    """Return why another attempt of a worker would end the same way, for people; empty if it may not."""
    if event.returncode in _RECURRING:
        return _RECURRING[event.returncode]
    # Another status is the script's own, or 126 and 127 of a program that cannot be run. Above it are signals that a
    # shell reports.
    is_own = 0 < event.returncode <= exit_codes.SIGNAL_BASE or event.returncode in _CRASHES
    may_pass = event.returncode == exit_codes.UNAVAILABLE or not is_own
    if process.attempt == 0 and not (process.connected or event.connected or may_pass):
        return _BEFORE_CONNECTING
    if event.returncode != exit_codes.FAILURE:
        return ""
    if event.error == exit_codes.CERTAIN:
        return _CERTAIN
    if event.error == exit_codes.DEBUGGER_LEFT:
        return f" (pdb, in a worker without a terminal: psdist run --debug-worker {event.key.number} gives it one)"
    return _REPEATED if event.error and event.error == process.last_error else ""


def _cannot_begin(returncode: int, attempt: int) -> bool:
    """Return True if a scheduler would end the same way each time.

    A restarted scheduler may find its port taken, or its storage unavailable, for a while.
    """
    return returncode == exit_codes.USAGE or (returncode == exit_codes.UNAVAILABLE and attempt == 0)
