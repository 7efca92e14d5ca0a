"""Alignment: hold all workers of a run at one position of their common program order. Pure.

Scripts that train several BSP parameter sets push them in one order, which all workers share. Joins, snapshot cuts and
shutdowns must fall on the start of an iteration for all sets. So workers are asked not to begin another iteration
(*gathering*), and report their positions. Then one position is chosen: the first start of an iteration that no worker
has passed. Workers before it run up to it (*aligning*). There they all wait (*aligned*) until nobody wants them held.

A worker may be past the chosen position by pushes that it has begun. Those pushes cannot be applied without the slowest
worker, so the weights of no set contain anything of the next iteration.

A position is the sum of the next steps of all ordered sets. Positions are comparable between workers and over restarts.

Alignment restarts when the members change, because a push may then be applied without the worker that left. It also
restarts when another set is trained.

Workers are never held if the run trains only one such set, or if they do not wait for each other. Workers that train
different sets have no common order, so they are not held either: each set is joined and cut by itself.

The exception are *parts*: sets of some workers each, as with model parallelism, where every worker trains equally many.
Their workers exchange activations, so they are in one iteration, and their positions are comparable. They are held for
cuts and shutdowns, but at a start of an iteration that none of them has passed: nobody else has to push for the steps
of a part. Workers that turn out to be further apart than one iteration train independent sets, which are cut by
themselves.

The callers decide what happens while workers are held (``joins``, ``run_end``, ``snapshots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from psdist.types import ParametersEntry, ParametersMember
from psdist.wire.limits import PERIOD_MAX
from psdist_scheduler.decide.cluster_events import AlignReported
from psdist_scheduler.decide.cluster_state import Identity, Member, name_some
from psdist_scheduler.decide.effects import AlignCommand, Answer, Effect, LogEvent, Wait
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry

#: Pause in seconds before workers are asked again if their iterations are not known yet. They train meanwhile.
RETRY_SECONDS: Final = 1.0
#: Remedy for a script whose iterations cannot be inferred.
REMEDY: Final = "If the script repeats no order of steps, declare each iteration by `with context.iteration():`"


@dataclass(slots=True)
class Alignment:
    """Holds all workers of one run at one start of an iteration, for as long as anybody wants that.

    number: sequence number of the last command. A restarted scheduler continues with higher numbers.
    """

    members: Membership
    registry: Registry
    number: int
    #: Holders: those that want workers to be held, such as "stop" or "join worker-2".
    _wanted: dict[str, None] = field(default_factory=dict)
    _participants: dict[Identity, None] = field(default_factory=dict)
    #: Parameter sets that workers are asked about.
    _names: tuple[str, ...] = ()
    _reports: dict[Identity, AlignReported] = field(default_factory=dict)
    _until: int | None = None
    #: Last command sent on each session.
    _sent: dict[int, AlignCommand] = field(default_factory=dict)
    #: True if no worker that has reported could tell where an iteration starts. Workers are then released and asked
    #: again later.
    is_unknown: bool = False
    #: True while workers have been asked for their position, and some have not answered.
    is_asking: bool = False
    _retry_at: float = 0.0
    #: True if the workers of parts turned out not to wait for each other.
    _is_apart: bool = False
    #: True if each iteration makes one step of every set, and all sets are at the same step. None if unknown.
    is_even: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ordered parameter sets that workers train. Empty unless all workers train the same sets."""
        entries = [e for e in self._ordered if e.members]
        who = [{member.identity for member in entry.members} for entry in entries]
        return tuple(entry.spec.name for entry in entries) if all(ids == who[0] for ids in who) else ()

    @property
    def parts(self) -> dict[Identity, set[str]]:
        """Names of the parts that each worker trains. Empty unless the ordered sets are parts."""
        entries = [e for e in self._ordered if e.members]
        if self._is_apart or len(entries) < 2 or not all(e.spec.workers for e in entries):
            return {}
        parts: dict[Identity, set[str]] = {}
        for entry in entries:
            for member in entry.members:
                parts.setdefault(member.identity, set()).add(entry.spec.name)
        return parts if all(len(names) == _sets_of_a_worker(parts) for names in parts.values()) else {}

    @property
    def held_names(self) -> tuple[str, ...]:
        """Names of the sets whose workers are held together: those that all workers train, or parts."""
        return self.names or tuple(sorted(set().union(*self.parts.values())))

    @property
    def is_opened(self) -> bool:
        """True unless an ordered set has no members. Workers that resume open their sets one after another."""
        return all(e.members for e in self._ordered)

    @property
    def known_names(self) -> tuple[str, ...]:
        """Names of the ordered parameter sets, with and without members."""
        return tuple(entry.spec.name for entry in self._ordered)

    @property
    def _ordered(self) -> list[ParametersEntry]:
        return [e for e in self.registry.entries if e.ready and e.shards and e.spec.is_ordered]

    @property
    def applies(self) -> bool:
        """True if the run trains several ordered parameter sets together."""
        return len(self.held_names) > 1

    @property
    def vector(self) -> dict[str, int] | None:
        """Step of each set at the position where all workers are held. None until they are."""
        if (
            self._until is None
            or self._names != self.held_names
            or self._participants.keys() != self._current_participants().keys()
            or any(report.position < self._until for report in self._reports.values())
        ):
            return None
        at_start = [report for report in self._reports.values() if report.position == self._until]
        return {name: step for report in at_start for name, step in report.next} or None

    def want(self, who: str) -> None:
        """Hold workers at the next start of an iteration, on behalf of ``who``."""
        self._wanted[who] = None

    def release(self, who: str) -> None:
        """Withdraw the wish of ``who`` to hold workers."""
        self._wanted.pop(who, None)

    def wants(self, prefix: str) -> list[str]:
        """Return the holders whose names begin with ``prefix``."""
        return [who for who in self._wanted if who.startswith(prefix)]

    def restart(self) -> None:
        """Discard the chosen position, which turned out to be unusable, and ask again now."""
        self._participants = {}
        self.is_unknown, self._retry_at = False, 0.0

    def on_report(self, event: AlignReported, now: float) -> list[Effect]:
        """Record a worker's progress, and choose a position once all workers have reported.

        A worker held by an outdated command is released.
        """
        member = self.members.by_session(event.call)
        if member is None or member.role != "worker":
            return []
        if event.number != self.number or not self._wanted:
            self._sent.pop(event.call, None)
            return [] if self._wanted else [Answer(event.call, AlignCommand(event.number, release=True))]
        if member.identity not in self._participants:
            return []
        self._reports[member.identity] = event
        if event.start is not None:
            self.is_unknown = False  # Others may still be busy.
        if self._until is not None and not self.names and event.position > self._until:
            self.restart()  # It has trained on, for example because it had lost its session.
        if self._until is None and self._is_gathered:
            self.is_asking = False
            positions = [report.position for report in self._reports.values()]
            if not self.names and max(positions) - min(positions) > _sets_of_a_worker(self.parts):
                self._is_apart = True  # They do not wait for each other.
                return self._release_all()
            self._until = self._choose()
            if self._until is None and not any(report.declared for report in self._reports.values()):
                return self._give_up(now)
            self._learn()
        return []

    def on_session(self, member: Member) -> None:
        """Forget what was sent on the worker's previous session; it may have been lost."""
        live = {self.members.sessions.call_of(worker.member_id) for worker in self.members.workers}
        self._sent = {session: sent for session, sent in self._sent.items() if session in live}
        self._reports.pop(member.identity, None)

    def progress(self, now: float) -> list[Effect]:
        """Follow changes of members, parameter sets and holders. Returns commands to workers."""
        if not self._wanted:
            return self._release_all() if self._sent else []
        if now < self._retry_at:
            return []
        participants = self._current_participants()
        # Resumed workers open their sets one after another. A position covers all sets only once the last one is open.
        names = self.held_names
        if participants.keys() != self._participants.keys() or names != self._names or not participants:
            self._participants, self._names, self._until = participants, names, None
            self._reports.clear()
            self.is_asking = bool(participants)
            self.number += 1
        return self._command_all()

    def _give_up(self, now: float) -> list[Effect]:
        """Release all workers for a while, because none can tell where an iteration starts."""
        was_unknown, self.is_unknown = self.is_unknown, True
        self._retry_at = now + RETRY_SECONDS
        names = ", ".join(map(repr, self.held_names))
        steps = ", ".join(f"step {step} of {name!r}" for name, step in next(iter(self._reports.values())).next)
        text = f"{names} have been trained in an order that does not repeat yet ({steps}), so nobody knows where an "
        warning = LogEvent(f"{text}iteration starts, for {', '.join(self._wanted)}. {REMEDY}", "warning")
        return [*([] if was_unknown else [warning]), *self._release_all()]

    def _learn(self) -> None:
        if self._until is None:
            return
        self.is_unknown = False
        known = next((r for r in self._reports.values() if r.start is not None and r.period), None)
        sets = len(self.names) or _sets_of_a_worker(self.parts)
        self.is_even = sets == 1 or (known is not None and known.period == sets and (known.start or 0) % sets == 0)

    def waits(self) -> Iterator[Wait]:
        """Yield the waits of held workers."""
        if not self._wanted or not self._participants:
            return
        if not self._is_gathered:
            busy = [worker for worker in self._workers() if worker.identity not in self._reports]
            yield "align", [], f"for {name_some(busy)} to report the start of an iteration"
        elif self.vector is None and self._until is not None:
            behind = [w for w in self._workers() if self._reports[w.identity].position < self._until]
            if behind:
                yield "align", [], f"for {name_some(behind)} to finish an iteration"

    def validate(self) -> None:
        assert self._reports.keys() <= self._participants.keys(), "a report of a worker that is not held"

    def _workers(self) -> list[Member]:
        return [worker for worker in self.members.workers if worker.identity in self._participants]

    def _current_participants(self) -> dict[Identity, None]:
        names = self.held_names
        members: list[ParametersMember] = [m for e in self.registry.entries if e.spec.name in names for m in e.members]
        return {m.identity: None for m in members}

    @property
    def _is_gathered(self) -> bool:
        """True if all workers have reported their next step of every set."""
        shared, parts = set(self.names), self.parts
        reports = [(self._reports.get(worker), parts.get(worker, shared)) for worker in self._participants]
        return bool(reports) and all(r is not None and names <= dict(r.next).keys() for r, names in reports)

    def _choose(self) -> int | None:
        """Return the first known start of an iteration that the slowest worker has not passed; of parts, that no worker
        has passed."""
        reports = list(self._reports.values())
        positions = [report.position for report in reports]
        least = min(positions) if self.names else max(positions)
        starts = [_first_start(report, least) for report in reports]
        return min((start for start in starts if start is not None), default=None)

    def _command_all(self) -> list[Effect]:
        effects: list[Effect] = []
        for worker in self._workers():
            session, command = self.members.sessions.call_of(worker.member_id), AlignCommand(self.number, self._until)
            if session and self._sent.get(session) != command:
                self._sent[session] = command
                effects.append(Answer(session, command))
        return effects

    def _release_all(self) -> list[Effect]:
        sent, self._sent = self._sent, {}
        self._participants, self._until = {}, None
        self._reports.clear()
        self.is_asking = False
        live = {self.members.sessions.call_of(worker.member_id) for worker in self.members.workers}
        return [Answer(session, AlignCommand(self.number, release=True)) for session in sent if session in live]


def _sets_of_a_worker(parts: Mapping[Identity, set[str]]) -> int:
    return next((len(names) for names in parts.values()), 0)


def _first_start(report: AlignReported, least: int) -> int | None:
    """Return the first start of an iteration at or after position ``least``, or None if ``report`` does not tell."""
    if report.start is None or not 0 <= report.position - report.start <= PERIOD_MAX:
        return None
    if report.period:
        return report.start + -(-(least - report.start) // report.period) * report.period
    return report.start if report.start >= least else None
