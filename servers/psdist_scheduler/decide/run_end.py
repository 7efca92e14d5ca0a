"""Ends of a run: the coordinated shutdown of workers, exits that would lose values, and a run that never starts. Pure.

In a coordinated shutdown workers agree on a final step that every worker has completed, save it, and exit.

A worker that receives SIGTERM reports it. Once every live worker has, they stop starting pushes and report their next
step. The final snapshot is cut at the smallest reported step. Faster workers are ahead of it only by pushes that cannot
be applied without the slowest one. When the servers have agreed to the cut, the workers exit. Without storage, they
exit immediately. If only some workers were asked to stop, each of them exits after its current push.

If the script trains several BSP parameter sets in turn, the workers are held at the start of an iteration instead
(``alignment``), and the final snapshot is cut there. Right after their start nobody knows where an iteration starts, so
they train on until that is known, for ``UNKNOWN_SECONDS`` at most. Then they are held where they are, for good: workers
that start no pushes could not run up to a start that becomes known afterwards.

Phases:

* *collecting*: some workers have reported SIGTERM.
* *asking*: polling the rest (a late reply means busy).
* *holding*: all are stopping; no new pushes.
* *saving*: final snapshot in progress.
* *leaving*: workers may exit.

``snapshots`` takes the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from psdist.consistency import BSP
from psdist.errors import ClosedError, PsdistError, RunNotStartedError, SnapshotFailedError
from psdist.types import ParametersMember
from psdist.wire.limits import REPORT_WAIT_SECONDS
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_events import Drain, GiveUp, Stop, StopReported
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member, name_some
from psdist_scheduler.decide.effects import (
    Answer,
    Broadcast,
    Done,
    Effect,
    LogEvent,
    Refuse,
    RunEnded,
    StopCommand,
    StopKind,
    Wait,
)
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.scaling import Scaling
from psdist_scheduler.decide.snapshots import Snapshots

#: Grace period for the remaining SIGTERMs: a launcher signals its workers one after another.
COLLECT_SECONDS: Final = 1.0
#: Longest time that a run which is stopping trains on to learn where an iteration starts.
UNKNOWN_SECONDS: Final = 5.0
#: Longest time workers wait for the final snapshot.
SAVE_SECONDS: Final = 10.0

#: Name under which workers are held.
_NAME: Final = "stop"

Phase = Literal["idle", "collecting", "asking", "holding", "saving", "leaving"]


@dataclass(slots=True)
class _StoppingWorker:
    """A worker's shutdown report.

    next: its next step per parameter set, once it has stopped pushing.
    is_held: it starts no more pushes, perhaps on behalf of this scheduler's predecessor.
    """

    stopping: bool
    is_held: bool = False
    #: Number of the last command that it answered.
    answered: int = 0
    next: Mapping[str, int] | None = None


@dataclass(slots=True)
class CoordinatedShutdown:
    """State machine for stopping all workers at one step."""

    members: Membership
    registry: Registry
    snapshots: Snapshots
    alignment: Alignment
    #: Sequence number of commands. A restarted scheduler continues with higher numbers.
    number: int
    phase: Phase = "idle"
    _since: float = 0.0
    _workers: dict[Identity, _StoppingWorker] = field(default_factory=dict)
    #: Final step per parameter set.
    _steps: tuple[tuple[str, int], ...] = ()
    #: Workers that were told to leave, and have not left yet.
    _leaving: set[Identity] = field(default_factory=set)
    #: Step of each set at which workers that train several ordered sets are held.
    _agreed: dict[str, int] = field(default_factory=dict)
    #: Workers are held where they are, since nobody learned in time where an iteration starts.
    _is_unknown: bool = False
    #: Command that was last sent to each worker.
    _sent: dict[Identity, tuple[int, StopKind]] = field(default_factory=dict)

    def on_report(self, event: StopReported) -> list[Effect]:
        """Record a worker's shutdown report."""
        member = self.members.by_session(event.call)
        if member is None or member.role != "worker":
            return []
        worker = self._workers.setdefault(member.identity, _StoppingWorker(event.stopping))
        worker.stopping = worker.stopping or event.stopping
        worker.answered = max(worker.answered, event.number)
        worker.is_held = worker.is_held or event.next is not None
        if event.next is not None and event.number == self.number:
            worker.next = dict(event.next)
        return []

    def on_session(self, member: Member) -> None:
        """Forget what was sent on the worker's previous session; it may have been lost."""
        self._sent.pop(member.identity, None)

    def progress(self, now: float) -> list[Effect]:
        """Advance through as many phases as the reports allow."""
        if self.phase == "idle" and not self._workers and not self._leaving:
            return []  # Fast path: called after every event, with possibly thousands of workers.
        live = {worker.identity for worker in self.members.workers}
        self._workers = {identity: worker for identity, worker in self._workers.items() if identity in live}
        self._leaving &= live
        effects: list[Effect] = []
        while True:
            before = self.phase
            effects += self._step(now)
            if self.phase == before:
                return effects + self._notify()

    def waits(self) -> Iterator[Wait]:
        match self.phase:
            case "asking" if busy := [worker for worker in self.members.workers if not self._has_answered(worker)]:
                yield "stop", [], f"for {name_some(busy)} to confirm shutdown"
            case "holding" if busy := [worker for worker in self._stopping if self._get(worker).next is None]:
                yield "stop", [], f"for {name_some(busy)} to report their step"

    def _step(self, now: float) -> list[Effect]:
        """Advance by one phase, if possible."""
        if self.phase == "holding" and not self._is_unknown and self._gives_up(now):
            self._is_unknown = True
            self.alignment.release(_NAME)
        match self.phase:
            case "idle" if any(worker.identity not in self._leaving for worker in self._stopping):
                self._enter(now, "collecting")
            case "collecting" | "asking" if not self._stopping:
                self._enter(now, "idle")
            case "collecting" | "asking" if len(self._stopping) == len(self.members.workers):
                self._enter(now, "holding")
            case "collecting" if now - self._since >= COLLECT_SECONDS:
                self._enter(now, "asking")
            case "asking" if all(self._has_answered(worker) for worker in self.members.workers):
                self._enter(now, "idle")  # Some stay.
                self._let_leave({})
            case "holding" | "saving" if len(self._stopping) < len(self.members.workers):
                # A worker that is not stopping has joined; its work must be saved later.
                self.snapshots.end_snapshot.forget()
                self._enter(now, "idle")
                return self._let_leave({})
            case "holding" if self._is_aligning:
                self.alignment.want(_NAME)
                if (vector := self.alignment.vector) is not None:
                    self._enter(now, "saving")
                    self._agreed = vector
                    return self.snapshots.save_for_the_end(self._agreed)
            case "holding" if all(self._get(worker).next is not None for worker in self._stopping):
                self._enter(now, "saving")
                return self.snapshots.save_for_the_end(self._final_steps())
            case "saving" if self._may_leave(now):
                self._enter(now, "leaving")
                return self._let_leave(self._agreed or self._final_steps())
            case "leaving" if not self._leaving:
                self._enter(now, "idle")
        return []

    def _enter(self, now: float, phase: Phase) -> None:
        self.phase, self._since = phase, now
        if phase not in ("saving", "leaving"):
            self._agreed = {}
            self._is_unknown = False
        if phase == "holding":
            self.alignment.restart()
        if phase == "idle":
            self.alignment.release(_NAME)
        self.number += phase in ("asking", "holding")

    def _may_leave(self, now: float) -> bool:
        return self.snapshots.end_snapshot.is_safe(self.snapshots.attempt) or now - self._since >= SAVE_SECONDS

    def _gives_up(self, now: float) -> bool:
        """Return True if workers are to be held where they are: they are already, or no start became known in time.

        A worker that is busy may know it by now: its answer is awaited.
        """
        if any(self._get(worker).is_held for worker in self._stopping):
            return True
        is_late = now - self._since >= UNKNOWN_SECONDS
        return is_late and self.alignment.is_unknown and not self.alignment.is_asking

    @property
    def _is_aligning(self) -> bool:
        """True if workers are to be held at the start of an iteration. If none became known, sets are saved at their
        current step."""
        return self.alignment.applies and not self._is_unknown

    @property
    def _stopping(self) -> list[Member]:
        return [worker for worker in self.members.workers if self._get(worker).stopping]

    def _get(self, worker: Member) -> _StoppingWorker:
        return self._workers.get(worker.identity) or _StoppingWorker(stopping=False)

    def _has_answered(self, worker: Member) -> bool:
        said = self._get(worker)
        return said.stopping or said.answered == self.number

    def _final_steps(self) -> dict[str, int]:
        """Return the final step of each BSP parameter set: the smallest next step of its members.

        Nobody can have finished a step that one of them has not started. Backup workers allow that many members to be
        behind.
        """
        ends: dict[str, int] = {}
        for entry in self.registry.entries:
            if entry.ready and entry.members and isinstance(entry.spec.consistency, BSP):
                steps = sorted(self._next(member, entry.spec.name) for member in entry.members)
                ends[entry.spec.name] = steps[min(entry.spec.consistency.backup_workers, len(steps) - 1)]
        return ends

    def _next(self, member: ParametersMember, parameters: str) -> int:
        said = self._workers.get(member.identity)
        return (said.next if said is not None and said.next is not None else {}).get(parameters, member.first_step)

    def _let_leave(self, ends: Mapping[str, int]) -> list[Effect]:
        self._steps = tuple(sorted(ends.items()))
        self._leaving |= {worker.identity for worker in self._stopping}
        steps = ", ".join(f"{name!r} at step {step}" for name, step in self._steps)
        return [LogEvent(f"{name_some(self._stopping)} stopping{f': {steps}' if steps else ''}", kind="shutdown")]

    def _notify(self) -> list[Effect]:
        """Return commands that follow from the phase and were not sent yet."""
        effects: list[Effect] = []
        for worker in self.members.workers:
            session, kind = self.members.sessions.call_of(worker.member_id), self._command(worker)
            if session and kind is not None and self._sent.get(worker.identity) != (self.number, kind):
                self._sent[worker.identity] = self.number, kind
                steps = self._steps if kind == "leave" else ()
                effects.append(Answer(session, StopCommand(self.number, kind, steps)))
        asking = self.phase == "asking"
        self._sent = {who: sent for who, sent in self._sent.items() if asking or who in self._workers}
        return effects

    def _command(self, worker: Member) -> StopKind | None:
        said = self._get(worker)
        if self.phase == "holding" and self._is_aligning:
            return None
        if self.phase == "holding" and said.stopping and said.next is None:
            return "hold"  # Includes workers that were told to leave and have not.
        if worker.identity in self._leaving:
            return "leave"
        if self.phase == "asking":
            return None if self._has_answered(worker) else "ask"
        return "hold" if self.phase in ("holding", "saving") and self._get(worker).stopping else None


# --- exits that would lose values -------------------------------------------------------------------------------------
#
# If the policy wants a snapshot at the end, everything trained since the last one is saved first. Only heartbeats
# sent after the request tell exactly what was trained. So they are awaited, unless no worker has been present since
# the last snapshot began. A shutdown does not wait for a snapshot that fails.
#
# A run is over when no worker has been present for the idle timeout, after some were. A lost worker may be restarted,
# so the timeout is then at least the lease of workers. When the run is over, the scheduler must exit, and its servers
# before it: they are notified once everything is saved, and awaited. A worker that registers before that withdraws
# this shutdown. So does a snapshot that fails: nothing is lost, and the next attempt follows one timeout later.
#
# Moving shards away is done by ``scaling``. A server is released as soon as nothing needs it.

#: Longest wait for servers to exit after RunEnded.
SERVERS_END_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Held:
    """A member that wants to exit."""

    event: Drain | Stop
    since: float
    #: True once it was decided whether a snapshot is needed.
    asked: bool = False
    #: Time at which servers were notified that the run is over (None: not yet), and the servers present then.
    told_at: float | None = None
    told: tuple[str, ...] = ()


@dataclass(slots=True)
class ExitRequests:
    """Members that want to exit and may not yet."""

    _settings: ClusterSettings
    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    _scaling: Scaling
    _held: dict[int, _Held] = field(default_factory=dict)
    #: Time since which no worker is present, or since a shutdown was withdrawn; None while a worker is present.
    _no_workers_since: float | None = None

    def hold(self, event: Drain | Stop, now: float) -> list[Effect]:
        """Hold a member that wants to exit. If others can take a server's shards, it is drained now instead.

        Raises InvalidArgumentError.
        """
        if isinstance(event, Drain):
            others = [server for server in self._members.staying if server.member_id != event.server_id]
            if self._members.workers and others:
                return self._scaling.drain(event)
        self._held[event.call] = _Held(event, now)
        return []

    def end_call(self, call: int) -> None:
        self._held.pop(call, None)

    def request_snapshots(self, now: float) -> list[Effect]:
        """Request a snapshot if one is needed."""
        if self._members.workers:
            self._no_workers_since = None
        elif self._no_workers_since is None:
            self._no_workers_since = now
        effects: list[Effect] = []
        for call, held in self._held.items():
            if not held.asked and self._is_known(held.since, now):
                held.asked = True
                server = held.event.server_id if isinstance(held.event, Drain) else ""
                effects += self._snapshots.save_before_the_end(call, server, now)
        return effects

    def release(self, now: float) -> list[Effect]:
        """Release callers that no longer have to wait."""
        effects: list[Effect] = []
        for call, held in list(self._held.items()):
            ends_servers = isinstance(held.event, Stop) and held.event.servers and held.told_at is None
            if ends_servers and self._members.workers:
                effects += self._withdraw(call, ClosedError(f"{self._members.workers[0]} is taking part again"))
                continue
            if not held.asked or call in self._snapshots.waiters:
                continue
            if ends_servers:
                if self._snapshots.has_unsaved:
                    self._no_workers_since = now
                    effects += self._withdraw(call, SnapshotFailedError("no snapshot contains the last training steps"))
                    continue
                held.told_at, held.told = now, tuple(server.member_id for server in self._members.servers)
                effects.append(Broadcast(RunEnded()))
            if self._waits_for_servers(held, now):
                continue
            del self._held[call]
            try:
                event = held.event
                effects += self._scaling.drain(event) if isinstance(event, Drain) else [Answer(call, Done())]
            except PsdistError as error:
                effects.append(Refuse(call, error))
        return effects

    def is_over(self, now: float) -> bool:
        """Return True if no worker has been present for the idle timeout, after some were."""
        limit, since = self._settings.idle_timeout_seconds, self._no_workers_since
        if not limit or since is None or not self._members.ranks:
            return False
        if any(member.role == "worker" and member.state == "lost" for member in self._members.all):
            limit = max(limit, self._settings.worker_lease_seconds)
        return now - since >= limit

    def on_session(self, call: int) -> list[Effect]:
        """Notify a new session if servers are shutting down, since it missed the broadcast."""
        return [Answer(call, RunEnded())] if any(held.told_at is not None for held in self._held.values()) else []

    def _withdraw(self, call: int, error: PsdistError) -> list[Effect]:
        """Cancel a shutdown, because the run continues and servers were not notified."""
        self.end_call(call)
        self._snapshots.waiters.end_call(call)
        return [Refuse(call, error)]

    def _waits_for_servers(self, held: _Held, now: float) -> bool:
        """Return True if servers that were notified of the end have yet to exit.

        One whose session broke counts: it may not have received the news, and would return.
        """
        if held.told_at is None or now - held.told_at >= SERVERS_END_SECONDS:
            return False
        told = (self._members.get(server) for server in held.told)
        return bool(self._members.servers) or any(server is not None and server.state != "left" for server in told)

    def _is_known(self, since: float, now: float) -> bool:
        """Return True if no report on pushes until ``since`` is awaited."""
        if not self._snapshots.saves_at_end or now - since > self._settings.lease_seconds:
            return True
        if self._no_workers_since is not None and self._snapshots.saved_at >= self._no_workers_since:
            return True
        owners = {owner for entry in self._registry.entries for owner in entry.primaries}
        liveness = self._members.sessions.liveness
        return all(liveness[owner].seen > since for owner in owners if owner in liveness)


# --- a run that never starts ------------------------------------------------------------------------------------------
#
# A run that never starts would occupy its machines forever: scripts that fail before ``psdist.init()`` never reach
# the scheduler. Two conditions end it, with RunNotStartedError at every member:
#
# * The required members were not all present at one time within ``start_timeout_seconds``.
# * An agent with a fixed number of nodes gave up, and its workers are still missing. An elastic run may use others.
#
# Once a parameter set is ready, the run has begun.

#: Interval in seconds at which a wait is reported after its first report.
REPEAT_SECONDS: Final = 60.0
_RANKS_SHOWN: Final = 8


@dataclass(slots=True)
class RunStart:
    """Waits for one run to begin.

    _since: start of this scheduler.
    _is_complete: True if the required members were present at one time.
    """

    _settings: ClusterSettings
    _members: Membership
    _registry: Registry
    _since: float
    _report_at: float = field(init=False)
    _is_complete: bool = False
    _has_begun: bool = False
    #: Why the first agent gave up; empty if none did.
    _given_up: str = ""

    def __post_init__(self) -> None:
        self._report_at = self._since + REPORT_WAIT_SECONDS

    def give_up(self, event: GiveUp) -> list[Effect]:
        """Process the end of an agent whose script fails."""
        text = f"the launcher on {event.host or 'an unknown host'} gave up: {event.reason}"
        if not event.elastic:
            self._given_up = self._given_up or text
        return [LogEvent(text, "warning"), Answer(event.call, Done())]

    def progress(self, now: float) -> list[Effect]:
        """Report the members that the run waits for, and end it if it cannot begin."""
        self._has_begun = self._has_begun or self._registry.has_begun
        if self._has_begun:
            return []
        shortage = self._members.demand.shortage(begun=True)
        if not shortage:
            self._is_complete = True
            return []
        if self._given_up:
            self._fail(f"{self._given_up}. Fix the script, and start the run again")
        if self._is_complete:
            return []
        waited, limit = now - self._since, self._settings.start_timeout_seconds
        text = f"waiting {shortage}{self._missing_ranks()}"
        if limit and waited >= limit:
            remedy = "See the logs of their launchers, and start the run again"
            self._fail(f"the run did not start within {limit:g} s (--start-timeout), {text}. {remedy}")
        if now < self._report_at:
            return []
        self._report_at = now + REPEAT_SECONDS
        until = f" of at most {limit:g} s (--start-timeout)" if limit else ""
        return [LogEvent(f"the run has not started: {text}, {waited:.0f} s so far{until}", "wait")]

    def _fail(self, text: str) -> None:
        self._registry.resume.fail(RunNotStartedError(text))

    def _missing_ranks(self) -> str:
        """Return the missing ranks if some are present; empty if all of them are missing."""
        there = set(self._members.demand.ranks_in_service)
        missing = [rank for rank in range(self._members.demand.workers_min) if rank not in there]
        if not there or not missing:
            return ""
        more = f" and {len(missing) - _RANKS_SHOWN} more" if len(missing) > _RANKS_SHOWN else ""
        return f" (rank {', '.join(map(str, missing[:_RANKS_SHOWN]))}{more})"
