"""Commits of initial values: a parameter set becomes ready only after every primary has confirmed its values. Pure.

A worker reports by CommitParameters that it uploaded the initial values. The scheduler then asks each primary, on its
current session, how many slices have values. If slices are missing, the call is refused and nothing changes: the worker
can install the rest and commit again. If a shard moves to another primary meanwhile, its values may be gone with the
old one, so the caller of ``check`` restarts the commit.

Invariant: A parameter set has at most one commit in progress.

``creation`` decides who may commit, and by which map.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from psdist.errors import InvalidArgumentError
from psdist.types import ParametersEntry, Replica
from psdist_scheduler.events.cluster_events import (
    Answer,
    CheckValues,
    CommitParameters,
    Done,
    Effect,
    LogEvent,
    Refuse,
    ValuesAnswered,
    refuse_older,
)
from psdist_scheduler.events.cluster_state import Member
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet, Registry


@dataclass(slots=True)
class Commit:
    """A CommitParameters call in progress.

    asked: servers that have not answered, with the session on which each was asked (0: not asked yet).
    """

    event: CommitParameters
    worker: Member
    number: int
    primaries: tuple[Replica, ...]
    asked: dict[str, int]


@dataclass(slots=True)
class Commits:
    """All commits in progress, by parameter set. Each has its own number, which identifies late answers."""

    _registry: Registry
    _members: Membership
    _number: int = 0
    _by_name: dict[str, Commit] = field(default_factory=dict)

    def start(self, p: ParameterSet, event: CommitParameters, worker: Member) -> list[Effect]:
        """Ask the primaries of a parameter set whose values are not committed. An earlier call for the same set is
        refused."""
        older = self._by_name.pop(p.name, None)
        effects: list[Effect] = [refuse_older(older.event.call, older.worker)] if older is not None else []
        self._number += 1
        primaries = _primaries(p.entry)
        asked = dict.fromkeys((primary.server_id for primary in primaries), 0)
        commit = self._by_name[p.name] = Commit(event, worker, self._number, primaries, asked)
        return [*effects, *(self._ask(commit) if asked else self._end(p, commit))]

    def on_answer(self, event: ValuesAnswered) -> list[Effect]:
        """Process a server's count of initialized slices. Commits the parameter set once every server has all of its
        slices."""
        server = self._members.sessions.member_of(event.call)
        commit = next((commit for commit in self._by_name.values() if commit.number == event.number), None)
        if commit is None or server not in commit.asked:
            return []
        p = self._registry.get(commit.event.parameters)
        assert p is not None, "a placed parameter set is kept"
        if event.installed < (wanted := _slices_of(p.entry, server)):
            del self._by_name[p.name]
            text = (
                f"{server} has initial values of {event.installed} of its {wanted} slices of {p.name!r}: Install all "
                "of them, then call CommitParameters again"
            )
            return [Refuse(commit.event.call, InvalidArgumentError(text, parameters=p.name, server=server))]
        del commit.asked[server]
        return [] if commit.asked else self._end(p, commit)

    def check(self) -> tuple[list[Effect], list[Commit]]:
        """Ask the servers for confirmation of the uploaded values, each once per session.

        Returns the effects and the commits to restart, which are removed: those whose parameter set changed, and those
        whose worker is gone.
        """
        changed = [commit for commit in self._by_name.values() if self._has_changed(commit)]
        for commit in changed:
            del self._by_name[commit.event.parameters]
        return [effect for commit in self._by_name.values() for effect in self._ask(commit)], changed

    def end_call(self, call: int) -> None:
        """Remove the call, which is over."""
        self._by_name = {name: commit for name, commit in self._by_name.items() if commit.event.call != call}

    def waiting_for(self, name: str) -> str:
        """Return a server that has not answered; empty if this parameter set has no commit in progress."""
        commit = self._by_name.get(name)
        return next(iter(commit.asked)) if commit is not None else ""

    def validate(self) -> None:
        for name, commit in self._by_name.items():
            p = self._registry.get(name)
            assert p is not None and not p.placed.committed and commit.asked, f"{name}: a commit that is over"

    def _ask(self, commit: Commit) -> list[Effect]:
        effects: list[Effect] = []
        for server, before in commit.asked.items():
            session = self._members.sessions.call_of(server)
            if session not in (0, before):
                commit.asked[server] = session
                effects.append(Answer(session, CheckValues(commit.number, commit.event.parameters)))
        return effects

    def _end(self, p: ParameterSet, commit: Commit) -> list[Effect]:
        del self._by_name[p.name]
        p.commit()
        return [
            Answer(commit.event.call, Done()),
            LogEvent(f"{commit.worker} uploaded the values of {p.name!r}", kind="parameters"),
        ]

    def _has_changed(self, commit: Commit) -> bool:
        p = self._registry.get(commit.event.parameters)
        if p is None or p.record is None or p.record.committed or p.member(commit.worker) is None:
            return True
        return _primaries(p.entry) != commit.primaries


def _primaries(entry: ParametersEntry) -> tuple[Replica, ...]:
    return tuple(shard.primary for shard in entry.shards)


def _slices_of(entry: ParametersEntry, server: str) -> int:
    """Return the number of slices whose primary ``server`` is."""
    shards, count = len(entry.shards), entry.slicing.count
    own = [number for number, shard in enumerate(entry.shards) if shard.primary.server_id == server]
    return sum(len(range(number, count, shards)) for number in own)
