"""Barriers, at which workers wait for each other under a name. Pure.

A barrier opens when all live workers wait at it, and at least the run's minimum of workers has come. It does not wait
for workers that left or died, but it does for those that have not started yet. The next use of its name is a new round.

Each arrival has a number: the rounds that its worker had passed before. The highest round that a worker has passed is
made durable before the worker is answered. So an arrival whose answer was lost is answered again, by the next scheduler
too, instead of waiting for workers that have moved on. A worker that gives up withdraws its arrival. The answer tells
whether that arrival had already opened the barrier. Requests are numbered too (``attempt``): one that arrives after a
later one of the same worker does not count.

Invariants: A worker waits at a name in at most one call. A withdrawn arrival opens nothing. A call that ended waits
nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from psdist.errors import InvalidArgumentError
from psdist.types import check_name
from psdist.wire.limits import BARRIER_NAMES_MAX, BARRIERS_PASSED_MAX
from psdist_scheduler.decide.cluster_events import EnterBarrier
from psdist_scheduler.decide.cluster_state import BarrierRecord, Member, name_some
from psdist_scheduler.decide.effects import Answer, Done, Effect, Wait, Withdrawn, refuse_older
from psdist_scheduler.decide.members import Membership


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
