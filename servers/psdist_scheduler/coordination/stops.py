"""The end of all workers together, agreed like a cut: what is saved is a step that all of them have made. Pure.

Workers that were asked to end (SIGTERM) report it. If all live workers were asked, they begin no more pushes and report
how far they are. The last snapshot is cut at the step of the worker that is least far: the others have passed that step
only by pushes that cannot be applied without this worker. When the servers have agreed to the cut, the workers leave.
Without a storage they leave at once. If only some workers were asked, they leave one by one, each after its push.

If the script trains several BSP parameter sets in turn, the workers are held at the start of an iteration instead
(``alignment``), and the last snapshot is cut there.

Phases: collecting (some have reported that they are to end), asking (the others are asked whether they are too; one
that answers late is busy), holding (all are, and they begin no more pushes), saving, leaving.

Not here: the snapshot (``schedule``), the ends of servers and of this scheduler (``shutdown``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from psdist.consistency import BSP
from psdist.types import ParametersMember
from psdist_scheduler.events.cluster_events import Answer, Effect, LogEvent, Wait
from psdist_scheduler.events.records import Identity, Member, name_some
from psdist_scheduler.events.worker_events import StopCommand, StopKind, StopReported
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.alignment import Alignment
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.snapshots.snapshots import Snapshots

#: Whoever ends a whole run asks its workers one after another: so long the others are waited for.
COLLECT_SECONDS: Final = 1.0
#: Servers that do not answer about the last snapshot keep no worker for longer.
SAVE_SECONDS: Final = 10.0

#: Name by which workers are held.
_NAME: Final = "stop"

Phase = Literal["idle", "collecting", "asking", "holding", "saving", "leaving"]


@dataclass(slots=True)
class _StoppingWorker:
    """What a worker has said. next: how far it is, once it begins no more pushes."""

    stopping: bool
    #: The command that it answered last.
    answered: int = 0
    next: Mapping[str, int] | None = None


@dataclass(slots=True)
class Stops:
    """The workers' end."""

    members: Membership
    registry: Registry
    snapshots: Snapshots
    alignment: Alignment
    #: Commands are numbered from here on: a restarted scheduler's are higher.
    number: int
    phase: Phase = "idle"
    _since: float = 0.0
    _workers: dict[Identity, _StoppingWorker] = field(default_factory=dict)
    #: By parameters, where those end that leave.
    _steps: tuple[tuple[str, int], ...] = ()
    #: Workers that were told to leave, and have not.
    _leaving: set[Identity] = field(default_factory=set)
    #: Step of each set where workers that train several ordered sets are held.
    _agreed: dict[str, int] = field(default_factory=dict)
    #: The command that each worker was sent last.
    _sent: dict[Identity, tuple[int, StopKind]] = field(default_factory=dict)

    def on_report(self, event: StopReported) -> list[Effect]:
        """A worker's word on its end."""
        member = self.members.by_session(event.call)
        if member is None or member.role != "worker":
            return []
        worker = self._workers.setdefault(member.identity, _StoppingWorker(event.stopping))
        worker.stopping = worker.stopping or event.stopping
        worker.answered = max(worker.answered, event.number)
        if event.next is not None and event.number == self.number:
            worker.next = dict(event.next)
        return []

    def on_session(self, member: Member) -> None:
        """A worker's session begins. What it was told on the one before may be lost."""
        self._sent.pop(member.identity, None)

    def progress(self, now: float) -> list[Effect]:
        """Goes on as far as all that was said allows."""
        if self.phase == "idle" and not self._workers and not self._leaving:
            return []  # Nobody was asked to end. This is asked after every event, and there may be 1,000 workers.
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
                yield "stop", [], f"for {name_some(busy)} to say whether it is to end, too"
            case "holding" if busy := [worker for worker in self._stopping if self._get(worker).next is None]:
                yield "stop", [], f"for {name_some(busy)} to say how far it is"

    def _step(self, now: float) -> list[Effect]:
        """One step on the way, if it can be made."""
        match self.phase:
            case "idle" if any(worker.identity not in self._leaving for worker in self._stopping):
                self._go(now, "collecting")
            case "collecting" | "asking" if not self._stopping:
                self._go(now, "idle")
            case "collecting" | "asking" if len(self._stopping) == len(self.members.workers):
                self._go(now, "holding")
            case "collecting" if now - self._since >= COLLECT_SECONDS:
                self._go(now, "asking")
            case "asking" if all(self._has_answered(worker) for worker in self.members.workers):
                self._go(now, "idle")  # Some stay.
                self._let_leave({})
            case "holding" | "saving" if len(self._stopping) < len(self.members.workers):
                # Somebody has come who stays. What it trains is to be saved.
                self.snapshots.end_snapshot.forget()
                self._go(now, "idle")
                return self._let_leave({})
            case "holding" if self._is_aligning:
                self.alignment.want(_NAME)
                if (vector := self.alignment.vector) is not None:
                    self._go(now, "saving")
                    self._agreed = vector
                    return self.snapshots.save_for_the_end(self._agreed)
            case "saving" if self._agreed and (self.snapshots.may_leave or now - self._since >= SAVE_SECONDS):
                self._go(now, "leaving")
                return self._let_leave(self._agreed)
            case "holding" if all(self._get(worker).next is not None for worker in self._stopping):
                self._go(now, "saving")
                return self.snapshots.save_for_the_end(self._ends())
            case "saving" if self.snapshots.may_leave or now - self._since >= SAVE_SECONDS:
                self._go(now, "leaving")
                return self._let_leave(self._ends())
            case "leaving" if not self._leaving:
                self._go(now, "idle")
        return []

    def _go(self, now: float, phase: Phase) -> None:
        self.phase, self._since = phase, now
        if phase not in ("saving", "leaving"):
            self._agreed = {}
        if phase == "holding":
            self.alignment.restart()
        if phase == "idle":
            self.alignment.release(_NAME)
        self.number += phase in ("asking", "holding")

    @property
    def _is_aligning(self) -> bool:
        """True if workers are to be held at the start of an iteration. If none is known, sets are saved where they
        are."""
        return self.alignment.applies and not self.alignment.is_unknown

    @property
    def _stopping(self) -> list[Member]:
        return [worker for worker in self.members.workers if self._get(worker).stopping]

    def _get(self, worker: Member) -> _StoppingWorker:
        return self._workers.get(worker.identity) or _StoppingWorker(stopping=False)

    def _has_answered(self, worker: Member) -> bool:
        said = self._get(worker)
        return said.stopping or said.answered == self.number

    def _ends(self) -> dict[str, int]:
        """By BSP parameters, where they end: what the worker that is least far has not begun, nobody has finished. With
        backup workers so many of the others are enough."""
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
        return [LogEvent(f"{name_some(self._stopping)} leave, as they were asked to{f': {steps}' if steps else ''}")]

    def _notify(self) -> list[Effect]:
        """Commands that follow from the phase and were not sent."""
        effects: list[Effect] = []
        for worker in self.members.workers:
            session, kind = self.members.sessions.of(worker.member_id), self._command(worker)
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
            return "hold"  # Who was told to leave before, and has not yet, too.
        if worker.identity in self._leaving:
            return "leave"
        if self.phase == "asking":
            return None if self._has_answered(worker) else "ask"
        return "hold" if self.phase in ("holding", "saving") and self._get(worker).stopping else None
