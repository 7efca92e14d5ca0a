"""Calls that wait: barriers, the reasons that callers are sent, and deadlocks. Pure.

At a barrier workers wait for each other under a name. It opens when all live workers wait at it, and at least the run's
minimum of workers has come. It does not wait for workers that left or died, but it does for those that have not started
yet. The next use of its name is a new round.

Each arrival has a number: the rounds that its worker had passed before. The highest round that a worker has passed is
made durable before the worker is answered. So an arrival whose answer was lost is answered again, by the next scheduler
too, instead of waiting for workers that have moved on. A worker that gives up withdraws its arrival. The answer tells
whether that arrival had already opened the barrier. Requests are numbered too (``attempt``): one that arrives after a
later one of the same worker does not count.

Invariants: A worker waits at a name in at most one call. A withdrawn arrival opens nothing. A call that ended waits
nowhere.

A waiting call is sent its reason, or its progress, when that changes, and every ``REPEAT_SECONDS``, so that its peer
can tell a wait from a dead connection. Long waits are logged. The reasons come from the machines that the calls wait
in.

Deadlocks among workers are detected, and their calls ended. A script may wait at a barrier while another one, which
counts its loop differently, waits for its push. Only an error helps then. Workers report what their scripts wait for
and, in the same message, their next pushes. Calls that wait here carry the same report. According to these reports, a
worker waits for others that have not pushed, or not called.

A cycle of such waits is real, although the reports are not simultaneous. The first of its workers to continue after its
report could do so only because the worker that it waited for pushed, or called, after its own report, and thus
continued before it. Only waits that cannot end by themselves count. Calls with a time limit, and clients used by
several threads, report no wait.

Calls of a group travel between workers, so one that is missing may be on its way. A cycle with such a wait counts once
each worker that lacks the call has confirmed that it has not made it, and still waits as it reported.

A message of any rank may come from each of them, so its receiver is held up only if all of them are. With such waits a
deadlock is a knot: a set in which each worker waits for another one, or for a message of any, and for none outside.

Other reasons for a stalled run, such as a script that never calls, are reported by ``Cluster.waits``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from psdist.consistency import BSP, SSP
from psdist.errors import InvalidArgumentError, LimitExceededError, MutualWaitError
from psdist.types import ParametersEntry, ParametersMember, check_name
from psdist.wire.limits import BARRIER_NAMES_MAX, BARRIERS_PASSED_MAX, REPORT_WAIT_SECONDS, WAITS_PER_MEMBER_MAX
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import Activity, CallChecked, EnterBarrier, GroupCall
from psdist_scheduler.decide.cluster_state import BarrierRecord, Member, name_some
from psdist_scheduler.decide.effects import (
    Answer,
    CheckCall,
    DeadlockFound,
    Done,
    Effect,
    LogEvent,
    Refuse,
    Wait,
    Withdrawn,
    refuse_older,
)
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry, awaited_workers


@dataclass(frozen=True, slots=True)
class Arrival:
    """A waiting worker."""

    call: int
    worker: Member
    #: Number of the arrival: the incarnation in which its worker began to count (0 if it does not), and the rounds
    #: passed since.
    origin: int
    passed: int


class Barriers:
    """All barriers of the run that somebody waits at, and the rounds that workers have passed."""

    def __init__(self, members: Membership, records: Iterable[BarrierRecord]) -> None:
        self._members = members
        self._rounds: dict[str, dict[str, Arrival]] = {}
        self._passed: dict[str, dict[str, BarrierRecord]] = {}
        for record in records:
            self._passed.setdefault(record.worker_id, {})[record.name] = record
        #: Origin and attempt of the newest request, and whether it was a withdrawal, by worker and name.
        self._heard: dict[str, dict[str, tuple[int, int, bool]]] = {}
        #: Rounds passed since ``take_changes``.
        self.changed: list[BarrierRecord] = []

    def enter(self, event: EnterBarrier, worker: Member) -> list[Effect]:
        """Process a worker's arrival at a barrier, or its withdrawal. An earlier call of the worker that still waits at
        this barrier is refused.

        Raises InvalidNameError and InvalidArgumentError.
        """
        name = check_name(event.name, "barrier name")
        if event.origin > worker.incarnation or event.passed >= BARRIERS_PASSED_MAX:
            raise InvalidArgumentError(
                f"arrival {event.passed} since incarnation {event.origin} at barrier {name!r} is not valid for "
                f"{worker}, whose incarnation is {worker.incarnation}"
            )
        if event.attempt and self._is_late(event, worker):
            return [Answer(event.call, Withdrawn())]
        waiting = self._rounds.get(name, {})
        older = waiting.pop(worker.member_id, None)
        effects: list[Effect] = [refuse_older(older.call, worker.member_id)] if older is not None else []
        if self._has_passed(event, worker):
            effects.append(Answer(event.call, Done()))
        elif event.withdraw:
            effects.append(Answer(event.call, Withdrawn()))
        else:
            arrival = Arrival(event.call, worker, event.origin, event.passed)
            self._rounds.setdefault(name, {})[worker.member_id] = arrival
        self._forget_empty()
        return effects

    def _is_late(self, event: EnterBarrier, worker: Member) -> bool:
        """Return True if a newer request of the worker has come before this one."""
        heard = self._heard.setdefault(worker.member_id, {})
        this = (event.origin, event.attempt, event.withdraw)
        newest = heard.pop(event.name, this)
        heard[event.name] = max(this, newest)
        _keep_newest(heard)
        return this < newest

    def _has_passed(self, event: EnterBarrier, worker: Member) -> bool:
        known = self._passed.get(worker.member_id, {}).get(event.name)
        return known is not None and known.origin == event.origin and known.passed > event.passed

    def end_call(self, call: int) -> None:
        for waiting in self._rounds.values():
            for worker_id in [worker_id for worker_id, arrival in waiting.items() if arrival.call == call]:
                del waiting[worker_id]
        self._forget_empty()

    def _forget_empty(self) -> None:
        for name in [name for name, waiting in self._rounds.items() if not waiting]:
            del self._rounds[name]

    def progress(self) -> list[Effect]:
        """Open the barriers that everybody has reached."""
        effects: list[Effect] = []
        for name in [name for name in self._rounds if not self._missing(name)]:
            for arrival in self._rounds.pop(name).values():
                self._pass(name, arrival)
                effects.append(Answer(arrival.call, Done()))
        return effects

    def _pass(self, name: str, arrival: Arrival) -> None:
        if not arrival.origin:  # Its client does not count.
            return
        record = BarrierRecord(arrival.worker.member_id, name, arrival.origin, arrival.passed + 1)
        passed = self._passed.setdefault(record.worker_id, {})
        passed.pop(name, None)
        passed[name] = record
        self.changed.append(record)
        _keep_newest(passed)

    def take_changes(self) -> tuple[BarrierRecord, ...]:
        """Return the rounds that workers have passed since the previous call."""
        changed, self.changed = self.changed, []
        return tuple(changed)

    @property
    def arrivals(self) -> Iterator[tuple[str, Arrival]]:
        """Yield the waiting workers, with the barrier of each."""
        for name, waiting in self._rounds.items():
            for arrival in waiting.values():
                yield name, arrival

    def absent(self, name: str) -> list[Member]:
        there = self._rounds.get(name, {})
        return [worker for worker in self._members.workers if worker.member_id not in there]

    def _missing(self, name: str) -> str:
        """Return the missing workers as text that begins with "for"; empty if all have come."""
        if absent := self.absent(name):
            return f"for {name_some(absent)}"
        needed = self._members.demand.workers_min
        lacking = needed - len(self._members.ranks)
        return f"for {lacking} of {needed} workers" if lacking > 0 else ""

    def waits(self) -> Iterator[Wait]:
        for name, waiting in self._rounds.items():
            calls = [arrival.call for arrival in waiting.values()]
            yield f"barrier {name}", calls, f"{self._missing(name)} to reach barrier {name!r}"

    def validate(self) -> None:
        calls = [arrival.call for _, arrival in self.arrivals]
        assert len(calls) == len(set(calls)), "a call waits at two barriers"
        assert all(self._rounds.values()), "a barrier that nobody waits at is kept"


def _keep_newest(by_name: dict[str, Any]) -> None:
    while len(by_name) > BARRIER_NAMES_MAX:
        del by_name[next(iter(by_name))]


# --- waiting calls ----------------------------------------------------------------------------------------------------


REPEAT_SECONDS = 2.0


@dataclass(slots=True)
class _Wait:
    """A reason to wait."""

    since: float
    text: str
    reported: str = ""


class WaitingCalls:
    """All waiting calls, and the reasons to wait."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        #: News that each call was last sent, and the time.
        self._told: dict[int, tuple[ef.Interim | None, float]] = {}
        self._waits: dict[str, _Wait] = {}

    @property
    def texts(self) -> list[str]:
        """One sentence per wait in progress, the oldest first."""
        return [wait.text for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]

    @property
    def all(self) -> tuple[int, ...]:
        """All waiting calls."""
        return tuple(self._owners)

    def check(self, worker: Member) -> None:
        """Raise LimitExceededError if this worker already waits in as many calls as it may."""
        if list(self._owners.values()).count(worker.member_id) >= WAITS_PER_MEMBER_MAX:
            raise LimitExceededError(f"{worker} waits in {WAITS_PER_MEMBER_MAX} calls already, which is the limit")

    def add(self, call: int, member_id: str) -> None:
        """Add a waiting call of this member; empty for a caller that is no member."""
        self._owners[call] = member_id

    def end_call(self, call: int) -> None:
        self._owners.pop(call, None)
        self._told.pop(call, None)

    def of_members(self, members: Collection[str]) -> list[tuple[int, str]]:
        """Return the waiting calls of these members, with the member of each."""
        return [(call, member_id) for call, member_id in self._owners.items() if member_id in members]

    def drop_answered(self, effects: Iterable[ef.Effect]) -> None:
        """Remove the calls that these effects answer for good."""
        for effect in effects:
            match effect:
                case ef.Answer(_, value) if isinstance(value, ef.Interim):
                    pass
                case ef.Answer(call) | ef.Refuse(call):
                    self.end_call(call)

    def report(self, waits: Iterable[ef.Wait], now: float) -> list[ef.Effect]:
        """Send waiting calls their reasons, and log long waits."""
        effects: list[ef.Effect] = []
        before, self._waits = self._waits, {}
        for key, calls, text in waits:
            wait = self._waits[key] = before.get(key) or _Wait(now, text)
            wait.text = text
            if now - wait.since >= REPORT_WAIT_SECONDS and wait.reported != text:
                wait.reported = text
                # Waiting callers report this themselves.
                level: Literal["wait", "call"] = "call" if calls else "wait"
                effects.append(ef.LogEvent(f"{key}: waiting {text}, {now - wait.since:.0f} s so far", level))
            for call in calls:
                effects += self.tell(call, ef.Waiting(text), now)
        return effects

    def tell(self, call: int, news: ef.Interim, now: float, pause: float = 0.0) -> list[ef.Effect]:
        """Send a call its news, unless it knows them. pause: shortest time between two messages."""
        told, at = self._told.get(call, (None, float("-inf")))
        if now - at < (pause if news != told else REPEAT_SECONDS):
            return []
        self._told[call] = news, now
        return [ef.Answer(call, news)]


# --- deadlocks --------------------------------------------------------------------------------------------------------


_REMEDY = (
    "None of them can continue. Let all workers make the same calls in the same order, and count loops by the "
    "parameters' step rather than by a counter of the script, which a dropped push does not change"
)

_GROUPS_NAMED: Final = 8

#: Id and incarnation of a worker, and the sequence of its wait.
_Waiting = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Edges of the wait-for graph from one worker to the workers that it waits for.

    text: reason for the wait, to follow the word "waits".
    call: the call that waits here; 0 for none.
    group_call: the call of a group that it waits for, or None.
    """

    worker: Member
    text: str
    awaited: tuple[str, ...]
    sequence: int
    call: int = 0
    group_call: GroupCall | None = None

    @property
    def identity(self) -> _Waiting:
        """The worker, and the sequence of its wait."""
        return (*self.worker.identity, self.sequence)

    @property
    def takes_any(self) -> bool:
        """True if one of the awaited workers can end the wait by itself."""
        return self.group_call is not None and bool(self.group_call.sources)


@dataclass(slots=True)
class Deadlocks:
    """Activities of workers. A cycle among them is reported once."""

    _members: Membership
    _registry: Registry
    _barriers: Barriers
    #: Newest activity of each worker, with the incarnation that reported it.
    _activities: dict[str, tuple[int, Activity]] = field(default_factory=dict)
    #: Activity that came with each open call.
    _calls: dict[int, Activity] = field(default_factory=dict)
    #: Pairs of waits. The worker of the second was asked, on this session, if it lacks the call of the first: True once
    #: it has confirmed that.
    _checks: dict[tuple[_Waiting, _Waiting], int | Literal[True]] = field(default_factory=dict)

    def on_activity(self, worker: Member, activity: Activity | None, call: int = 0) -> None:
        """Record a worker's activity. call: the call that it came with, if that waits for an answer."""
        if activity is None:
            return
        known = self._activities.get(worker.member_id)
        if known is None or (known[0], known[1].age) < (worker.incarnation, activity.age):
            self._activities[worker.member_id] = worker.incarnation, activity
        if call:
            self._calls[call] = activity

    def on_checked(self, event: CallChecked) -> None:
        """Record that a worker lacks the call that it was asked about."""
        worker = self._members.by_session(event.call)
        if worker is not None:
            waiting = event.worker_id, event.incarnation, event.waiting
            check = waiting, (*worker.identity, event.sequence)
            if check in self._checks:
                self._checks[check] = True

    def end_call(self, call: int) -> None:
        self._calls.pop(call, None)

    def progress(self) -> tuple[list[Effect], list[int]]:
        """End the calls of deadlocked workers. Returns the effects, and the calls that no longer wait here."""
        for worker_id, (incarnation, _) in list(self._activities.items()):
            if not self._members.is_live(worker_id, incarnation):
                del self._activities[worker_id]
        waits = {wait.worker.member_id: wait for wait in self._waits()}
        awaited = {worker_id: wait.awaited for worker_id, wait in waits.items()}
        lasting = {wait.identity for wait in waits.values()}
        self._checks = {check: state for check, state in self._checks.items() if lasting.issuperset(check)}
        effects: list[Effect] = []
        calls: list[int] = []
        takers = {worker_id for worker_id, wait in waits.items() if wait.takes_any}
        while knot := _find_knot(awaited, takers):
            found = {waits[worker_id]: [waits[other] for other in others] for worker_id, others in knot.items()}
            if unconfirmed := self._unconfirmed(found, effects):
                for wait, other in unconfirmed:
                    left = tuple(one for one in awaited[wait.worker.member_id] if one != other.worker.member_id)
                    awaited[wait.worker.member_id] = () if wait.takes_any else left
                continue
            for worker_id in knot:
                del awaited[worker_id]
            text = _text(found)
            # A worker that makes the missing call after its error must not release the others without one.
            keys = dict.fromkeys(wait.group_call.group.hex() for wait in found if wait.group_call is not None)
            groups = {f"group_{number}": key for number, key in enumerate(list(keys)[:_GROUPS_NAMED])}
            error = MutualWaitError(f"{text}. {_REMEDY}", **groups)
            effects.append(LogEvent(f"deadlock: {text}", "warning"))
            # Waits for steps end first: a rank whose group has ended may push, which would end them without an error.
            for wait in sorted(found, key=lambda wait: wait.group_call is not None):
                del self._activities[wait.worker.member_id]
                if wait.call:
                    calls.append(wait.call)
                    effects.append(Refuse(wait.call, error))
                else:
                    effects += self._members.tell([wait.worker.member_id], DeadlockFound(wait.sequence, error))
        return effects, calls

    def _unconfirmed(
        self, knot: Mapping[WaitFor, Sequence[WaitFor]], effects: list[Effect]
    ) -> list[tuple[WaitFor, WaitFor]]:
        """Return the waits for calls of groups that an awaited worker of a knot has not confirmed, with that worker's.

        effects: takes questions to those that have not been asked.
        """
        found = []
        for wait, other in ((wait, other) for wait, others in knot.items() for other in others):
            check = wait.identity, other.identity
            if (call := wait.group_call) is None or self._checks.get(check) is True:
                continue
            found.append((wait, other))
            session = self._members.sessions.call_of(other.worker.member_id)
            if session and self._checks.get(check) != session:
                self._checks[check] = session
                counts = call.counts_of(other.worker.member_id)
                question = CheckCall(other.sequence, *wait.identity, call.group, call.message, *counts)
                effects.append(Answer(session, question))
        return found

    def _waits(self) -> Iterator[WaitFor]:
        """Yield all known waits for other workers."""
        groups: dict[tuple[str, str, int, bool], tuple[str, ...]] = {}
        for worker_id, (_, activity) in self._activities.items():
            worker = self._members.get(worker_id)
            if worker is not None and (call := activity.group_call) is not None:
                others = tuple(
                    other for other, incarnation in call.awaited if self._members.is_live(other, incarnation)
                )
                if not call.sources or len(others) == len(call.awaited):  # Else its loss ends the wait.
                    yield WaitFor(worker, call.text, _others(others, worker), activity.sequence, group_call=call)
            if worker is None or activity.kind not in ("step", "clock"):
                continue
            key = (activity.kind, activity.parameters, activity.number, activity.parameters in activity.partial)
            if key not in groups:
                groups[key] = tuple(self._behind(activity))
            what = "in step" if activity.kind == "step" else "at clock"
            text = f"{what} {activity.number} of {activity.parameters!r}"
            yield WaitFor(worker, text, _others(groups[key], worker), activity.sequence)
        yield from self._call_waits()

    def _call_waits(self) -> Iterator[WaitFor]:
        absent_from: dict[str, tuple[str, ...]] = {}
        for name, arrival in self._barriers.arrivals:
            if name not in absent_from:
                absent_from[name] = tuple(worker.member_id for worker in self._barriers.absent(name))
            yield from self._call_wait(arrival.call, arrival.worker, f"at barrier {name!r}", absent_from[name])
        # A worker that rejoins opens all of its sets together: its calls for the others may be in transit.
        rejoining = {p.creators[call].member_id for p in self._registry.all for call in p.resumes if call in p.creators}
        for p in self._registry.all:
            if p.record is None:
                called = {worker.member_id for worker in (*p.creators.values(), *p.describers.values())}
                awaited = [worker.member_id for worker in awaited_workers(p, self._members)]
                absent = tuple(worker_id for worker_id in awaited if worker_id not in called | rejoining)
                for call, worker in p.creators.items():
                    yield from self._call_wait(call, worker, f"to create {p.name!r}", absent)

    def _call_wait(self, call: int, worker: Member, text: str, awaited: tuple[str, ...]) -> Iterator[WaitFor]:
        said, known = self._calls.get(call), self._activities.get(worker.member_id)
        if said is None or said.kind != "call" or known is None or known[0] != worker.incarnation:
            return
        if known[1].kind == "call" and known[1].sequence == said.sequence:
            yield WaitFor(worker, text, awaited, said.sequence, call)

    def _behind(self, activity: Activity) -> Iterator[str]:
        """Yield members that reported that they have not pushed what ``activity`` waits for.

        A worker that pushed a part may wait for just the slices that another one also pushed. So it waits for those
        that have pushed nothing.
        """
        p = self._registry.get(activity.parameters)
        if p is None or p.record is None or not _waits_for_all(p.entry):
            return
        whole = p.name not in activity.partial
        for member in p.entry.members:
            next_push = self._next(member, p.name, whole=whole)
            if next_push is not None and _progress(member, next_push, activity.kind) < activity.number + (
                activity.kind == "step"
            ):
                yield member.worker_id

    def _next(self, member: ParametersMember, parameters: str, *, whole: bool) -> int | None:
        """Return the number of the member's next push, as it last reported; None if it did not.

        whole: True to count a partial push as the next one.
        """
        incarnation, activity = self._activities.get(member.worker_id, (0, None))
        if activity is None or incarnation != member.incarnation:
            return None
        # Sorted, and there may be a thousand of them for each of a thousand workers.
        at = bisect_left(activity.next, (parameters,))
        if at == len(activity.next) or activity.next[at][0] != parameters:
            return None
        return activity.next[at][1] + (not whole and parameters in activity.partial)


def _waits_for_all(entry: ParametersEntry) -> bool:
    """Return True if a single member that does not push can hold up the others."""
    consistency = entry.spec.consistency
    return isinstance(consistency, SSP) or (isinstance(consistency, BSP) and not consistency.backup_workers)


def _progress(member: ParametersMember, next_push: int, kind: str) -> int:
    """Return the steps that a member has contributed to, or its clock. A member before its first step is not
    awaited."""
    if kind == "clock":
        return member.first_step + next_push - member.first_push
    return max(next_push, member.first_step)


def _others(awaited: Sequence[str], worker: Member) -> tuple[str, ...]:
    return tuple(other for other in awaited if other != worker.member_id)


def _find_knot(awaited: Mapping[str, Sequence[str]], takers: Set[str]) -> dict[str, Sequence[str]]:
    """Return workers that wait for each other, with those that each waits for; empty if there are none.

    takers: workers that continue once one of those that they wait for does. Without any, the workers are a cycle.
    """
    if not takers & awaited.keys():
        circle = _find_circle(awaited)
        return {one: [circle[(at + 1) % len(circle)]] for at, one in enumerate(circle)}
    stuck = set(awaited)
    while free := {one for one in stuck if not _is_stuck(awaited[one], stuck, is_taker=one in takers)}:
        stuck -= free
    # Each of them is held up by one that is stuck too, or by all of its sources.
    held = {
        one: others if one in takers else [next(other for other in others if other in stuck)]
        for one, others in awaited.items()
        if one in stuck
    }
    # Without those that only wait for the others.
    knot = _reached(next(iter(held)), held) if held else []
    while smaller := next((path for one in knot if len(path := _reached(one, held)) < len(knot)), None):
        knot = smaller
    return {one: held[one] for one in knot}


def _is_stuck(others: Sequence[str], stuck: Set[str], *, is_taker: bool) -> bool:
    """Return True if a worker cannot continue before one of ``stuck`` does."""
    if is_taker:
        return bool(others) and stuck >= set(others)
    return not stuck.isdisjoint(others)


def _reached(start: str, held: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the workers that hold up ``start``, directly or not, and itself."""
    found = {start: None}
    ahead = [start]
    while ahead:
        for other in held[ahead.pop()]:
            if other not in found:
                found[other] = None
                ahead.append(other)
    return list(found)


def _find_circle(awaited: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the ids of workers in a cycle, each waiting for the next; empty if there is no cycle."""
    done: set[str] = set()
    for start in awaited:
        path: list[str] = []
        ahead: list[Iterator[str]] = []
        if start not in done:
            path, ahead = [start], [iter(awaited[start])]
        while path:
            following = next(ahead[-1], None)
            if following is None:
                done.add(path.pop())
                ahead.pop()
            elif following in path:
                return path[path.index(following) :]
            elif following in awaited and following not in done:
                path.append(following)
                ahead.append(iter(awaited[following]))
    return []


def _text(knot: Mapping[WaitFor, Sequence[WaitFor]]) -> str:
    """Describe a knot. A cycle: "worker-0 (rank 0) waits at barrier 'end' for worker-1 (rank 1), which waits in step 7
    of 'p' for worker-0"."""
    if any(len(others) > 1 for others in knot.values()):
        waits = [f"{wait.worker} waits {wait.text} for {_named(others)}" for wait, others in knot.items()]
        return "; ".join(waits)
    first, *rest = knot
    parts = [f"{first.worker} waits {first.text} for "]
    parts += [f"{wait.worker}, which waits {wait.text} for " for wait in rest]
    return "".join([*parts, first.worker.member_id])


def _named(others: Sequence[WaitFor]) -> str:
    *rest, last = (other.worker.member_id for other in others)
    return f"{', '.join(rest)} or {last}" if rest else last
