"""Coordinated shutdown of workers: agree on a final step that every worker has completed, save it, then let them exit.
Pure.

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

The snapshot is taken by ``schedule``; ``exit_requests`` ends servers and this scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from psdist.consistency import BSP
from psdist.types import ParametersMember
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent, Wait
from psdist_scheduler.events.cluster_state import Identity, Member, name_some
from psdist_scheduler.events.worker_events import StopCommand, StopKind, StopReported
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.alignment import Alignment
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.snapshots.snapshots import Snapshots

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
        said = self._workers.get((member.worker_id, member.incarnation))
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
