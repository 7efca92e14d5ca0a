"""One attempt at a snapshot: what was agreed, who has answered, and what is written. Pure.

Its phases: preparing (servers are asked whether the cut can be had), marking (SSP and ASP: workers are asked for their
next pushes), cutting (servers write), committing (all is durable; the storage gets the manifest and the record). An
attempt depends on the primaries and, where pushes are marked, on the members. ``changed`` says whether they changed.

Not here: when an attempt begins and what follows from its end (``schedule``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from psdist.consistency import BSP
from psdist.errors import SnapshotFailedError
from psdist.snapshots.format import DatasetState, Manifest, ParametersState
from psdist_scheduler.events.cluster_events import Answer, Effect
from psdist_scheduler.events.records import name_some
from psdist_scheduler.events.snapshot_events import (
    AttemptProgress,
    End,
    Mark,
    Marked,
    Prepare,
    Producers,
    SnapshotCommand,
    TakeCut,
    Written,
)
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.parameters import ParameterSet
from psdist_scheduler.snapshots.worker_states import WorkerStateUploads

Phase = Literal["preparing", "marking", "cutting", "committing"]
#: A worker's id and incarnation.
_Life = tuple[str, int]


@dataclass(slots=True)
class Attempt:
    """The attempt under way.

    number: higher than that of any before. directory: where its files lie. ahead: its step is far, and nobody waits.
    parameters: what is saved, in the manifest's order. steps: of the cut, by BSP parameters.
    """

    number: int
    directory: str
    reason: str
    ahead: bool
    parameters: tuple[ParameterSet, ...]
    steps: dict[str, int]
    began: float
    #: When something of it was heard last.
    moved: float
    phase: Phase = "preparing"
    #: By parameters, primary and term of each shard when it began.
    routes: dict[str, tuple[object, ...]] = field(default_factory=dict)
    #: By server, whether it has accepted; None until it answers.
    servers: dict[str, bool | None] = field(default_factory=dict)
    #: By worker whose pushes are marked, its next pushes; None until it answers.
    lives: dict[_Life, dict[str, int] | None] = field(default_factory=dict)
    #: When all files were written.
    whole_at: float | None = None
    #: Workers that may have used data before the cut without having said so.
    undecided: list[str] = field(default_factory=list)
    written: dict[tuple[str, int], Written] = field(default_factory=dict)
    progress: dict[str, AttemptProgress] = field(default_factory=dict)
    #: What workers hand in of their own.
    kept: WorkerStateUploads = field(default_factory=WorkerStateUploads)

    def __post_init__(self) -> None:
        self.kept.numbers = {p.name: number for number, p in enumerate(self.parameters)}
        for p in self.parameters:
            self.routes[p.name] = _route(p)
            self.servers |= dict.fromkeys(p.entry.primaries)
            if p.name in self.marked:
                self.lives |= dict.fromkeys((m.worker_id, m.incarnation) for m in p.entry.members)

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is saved."""
        return tuple(p.name for p in self.parameters)

    @property
    def marked(self) -> tuple[str, ...]:
        """Names of the parameters whose pushes are marked: those without steps in common."""
        return tuple(p.name for p in self.parameters if p.name not in self.steps)

    @property
    def step(self) -> int:
        """Of the cut, for people: the highest."""
        return max((self.steps.get(p.name, p.version) for p in self.parameters), default=0)

    @property
    def reached(self) -> bool:
        """Whether some of the snapshot was seen at the cut, so that no more pushes are needed for it, or nearly."""
        if self.written:
            return True
        passed = all(p.version >= self.steps.get(p.name, 0) for p in self.parameters)
        return self.phase == "cutting" and passed and not self.is_held

    @property
    def bytes_done(self) -> int:
        """Bytes written, as servers told last."""
        return sum(progress.done for progress in self.progress.values())

    @property
    def bytes_total(self) -> int:
        """Bytes to be written, as servers told last."""
        return sum(progress.total for progress in self.progress.values())

    @property
    def stage(self) -> str:
        """ "cutting", "writing" or "committing", for people."""
        if self.phase == "committing":
            return self.phase
        return "writing" if self.written or self.bytes_done else "cutting"

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Shards whose files are not written."""
        shards = ((p.name, number) for p in self.parameters for number in range(len(self.routes[p.name])))
        return [shard for shard in shards if shard not in self.written]

    @property
    def is_whole(self) -> bool:
        """Whether all files are written, and nothing more was done about it."""
        return self.phase == "cutting" and not self.missing and not self.kept.missing

    @property
    def is_held(self) -> bool:
        """Whether a server says that it waits for something."""
        return any(progress.waiting_for for progress in self.progress.values())

    def asks(self, life: _Life) -> bool:
        """Whether a worker is asked that has not answered."""
        return self.lives.get(life, {}) is None or not self.kept.answers.get(life, True)

    @property
    def is_agreed(self) -> bool:
        """Whether all workers that are asked have answered."""
        return None not in self.lives.values() and not any(self.kept.asked)

    @property
    def waiting_for(self) -> str:
        """What it waits for, as a sentence that begins with "for"."""
        match self.phase:
            case "preparing":
                return f"for {name_some([s for s, answer in self.servers.items() if answer is None])} to agree on a cut"
            case "marking":
                workers = [worker for (worker, _), next in self.lives.items() if next is None]
                return f"for {name_some([*dict.fromkeys((*workers, *self.kept.asked))])} to mark its pushes"
            case "committing":
                return "for the storage to take the manifest and the commit record"
        if not self.reached and self.steps:
            return f"for {' and '.join(f'step {step} of {name!r}' for name, step in self.steps.items())}"
        if text := next((p.waiting_for for p in self.progress.values() if p.waiting_for), ""):
            return text
        if not self.missing and self.kept.missing:
            return self.kept.waiting_for
        if not self.missing:
            return f"for {name_some(self.undecided)} to say what data it has used"
        late = dict.fromkeys(self._writer(name, number) for name, number in self.missing)
        return f"for {name_some(list(late))} to write"

    def _writer(self, name: str, number: int) -> str:
        p = next(p for p in self.parameters if p.name == name)
        return p.entry.primaries[number] if p.record is not None else "a server"

    def changed(self, members: Membership) -> str:
        """What it rests on and is not there any more; empty if all is."""
        for p in self.parameters:
            if p.record is None or _route(p) != self.routes[p.name]:
                return f"shards of {p.name!r} have other primaries"
        if self.marked and self.phase != "committing":
            lives = {(m.worker_id, m.incarnation) for p in self._marked() for m in p.entry.members}
            if lives != self.lives.keys():
                who = name_some(sorted({worker for worker, _ in lives ^ self.lives.keys()}))
                return f"{who} joined or left, whose pushes are marked"
        return ""

    # --- what members say ---------------------------------------------------------------------------------------------

    def numbers(self, life: tuple[str, int]) -> dict[str, int]:
        """By parameter set, the bound below which pushes of this worker are in the snapshot."""
        marked = self.lives.get(life) or {}
        return {p.name: self.steps.get(p.name, marked.get(p.name, 0)) for p in self.parameters}

    def take_marked(self, life: _Life, event: Marked) -> dict[str, int]:
        """A worker has answered. Returns the steps that are needed instead, where what it keeps cannot be had at the
        cut any more."""
        if life in self.lives and self.lives[life] is None:
            self.lives[life] = dict(event.next)
        return self.kept.marked(life, event, self.steps)

    def take_written(self, event: Written, server: str) -> bool:
        """A file is durable. False where that is said by somebody who is not the shard's primary of this term."""
        p = next((p for p in self.parameters if p.name == event.parameters), None)
        if p is None or not 0 <= event.shard < len(p.entry.shards):
            return False
        shard = p.entry.shards[event.shard]
        if shard.primary.server_id != server or shard.term != event.term:
            return False
        self.written[event.parameters, event.shard] = event
        return True

    # --- commands -----------------------------------------------------------------------------------------------------

    def prepare(self, server: str, members: Membership) -> list[Effect]:
        """Asks a server, if it has a session."""
        steps = tuple((p.name, self.steps.get(p.name, 0)) for p in self.parameters)
        return _tell([server], Prepare(self.number, self.directory, steps), members)

    def mark(self, worker: str, members: Membership) -> list[Effect]:
        """Asks a worker, if it has a session."""
        return _tell([worker], Mark(self.number, tuple(sorted(self.steps.items()))), members)

    def mark_all(self, members: Membership) -> list[Effect]:
        """Asks all workers that are to be asked."""
        self.phase = "marking"
        workers = dict.fromkeys(worker for worker, _ in (*self.lives, *self.kept.answers))
        return [effect for worker in workers for effect in self.mark(worker, members)]

    def cut(self, members: Membership, known: Mapping[str, int]) -> list[Effect]:
        """Tells the servers to write. ``known``: by BSP parameters, the highest step that any slice is at."""
        producers = tuple((name, self._next(name, by_origin=True)) for name in self.marked)
        left = [p.name for p in self.parameters if p.name in self.steps and not p.entry.members]
        final = tuple((name, self.steps[name]) for name in left if self.steps[name] == known.get(name))
        return _tell(self.servers, TakeCut(self.number, producers, final), members)

    def end(self, committed: bool, reason: str, members: Membership) -> list[Effect]:
        """Tells all who were asked that it is over."""
        workers = [worker for worker, _ in (*self.lives, *self.kept.answers)]
        return _tell([*self.servers, *workers], End(self.number, committed, reason), members)

    # --- the manifest -------------------------------------------------------------------------------------------------

    def _next(self, name: str, *, by_origin: bool) -> Producers:
        """The next push of each member of parameters whose pushes are marked, by its id and its incarnation or, as
        servers know pushes, by its origin."""
        p = next(p for p in self.parameters if p.name == name)
        return tuple(
            (m.worker_id, m.producer[1] if by_origin else m.incarnation, (self.lives[life] or {}).get(name, 0))
            for m in p.entry.members
            for life in ((m.worker_id, m.incarnation),)
        )

    def manifest(
        self,
        run_id: str,
        epoch: int,
        configuration: Mapping[str, str | int],
        datasets: tuple[DatasetState, ...],
    ) -> Manifest:
        """All of it; its time and version are for the writer. Raises InvalidArgumentError and SnapshotFailedError where
        what servers said cannot be a snapshot."""
        return Manifest(
            run_id=run_id,
            directory=self.directory,
            epoch=epoch,
            time=0.0,
            reason=self.reason,
            configuration=configuration,
            parameters=self.states(),
            datasets=datasets,
            states=self.kept.files,
        )

    def states(self) -> tuple[ParametersState, ...]:
        """What the manifest says of the parameters. Raises InvalidArgumentError and SnapshotFailedError where what
        servers said cannot be a snapshot."""
        return tuple(self._state(p) for p in self.parameters)

    def _state(self, p: ParameterSet) -> ParametersState:
        parts = [self.written[p.name, number] for number in range(len(self.routes[p.name]))]
        names = {part.state_names for part in parts}
        if len(names) > 1:
            raise SnapshotFailedError(f"servers disagree on the optimizer's arrays of {p.name!r}: {sorted(names)}")
        versions = [version for part in parts for version in part.file.versions]
        step = self.steps.get(p.name)
        if step is not None and any(version != step for version in versions):
            raise SnapshotFailedError(
                f"slices of {p.name!r} were written at versions {min(versions)} to {max(versions)}, not at the cut's "
                f"step {step}"
            )
        return ParametersState(
            spec=p.entry.spec,
            layout=p.placed.layout,
            reference_workers=p.entry.reference_workers,
            state_names=parts[0].state_names,
            step=max(versions, default=0) if step is None else step,
            next=self._next(p.name, by_origin=False) if step is None else (),
            shards=tuple(part.file for part in parts),
            state_since=p.entry.state_since,
        )

    def _marked(self) -> Iterable[ParameterSet]:
        return (p for p in self.parameters if p.name not in self.steps)


@dataclass(slots=True)
class Failures:
    """Attempts that were given up for good."""

    count: int = 0
    text: str = ""
    at: float = 0.0


def is_stepped(p: ParameterSet) -> bool:
    """Whether the parameters are cut at a step, and not by marks on pushes."""
    return isinstance(p.entry.spec.consistency, BSP)


def floor(attempt: Attempt | None, ready: Iterable[ParameterSet], life: _Life) -> dict[str, int]:
    """By parameters, what no cut to come can be below for a life, while ``attempt`` is under way. Those that are
    not named, it cannot."""
    steps: dict[str, int] = {}
    for p in ready:
        under_way = attempt is not None and p.name in attempt.names
        if is_stepped(p):
            steps[p.name] = min(p.version, attempt.steps[p.name]) if attempt and under_way else p.version
        elif attempt and under_way:
            steps[p.name] = (attempt.lives.get(life) or {}).get(p.name, 0)
    return steps


def _route(p: ParameterSet) -> tuple[object, ...]:
    return tuple((shard.primary, shard.term, shard.lost) for shard in p.entry.shards)


def _tell(who: Iterable[str] | Sequence[str], command: SnapshotCommand, members: Membership) -> list[Effect]:
    sessions = [members.session_of(member) for member in dict.fromkeys(who)]
    return [Answer(session, command) for session in sessions if session]
