"""One attempt at a snapshot: its cut, its phase, the answers so far, and the files written. Pure.

An attempt asks the servers whether they can take the cut (*preparing*). In SSP and ASP, and if workers save state of
their own, it asks those workers for their next pushes (*marking*). Then the servers write (*cutting*). When everything
is durable, the storage gets the manifest and the commit record (*committing*).

The cut determines which pushes of which parameter sets are in the snapshot. A BSP parameter set is cut at a step. In
SSP and ASP each member marks its pushes: it names the first push that is not in the snapshot. So a cut stays valid
while the primaries and, if pushes are marked, the members stay the same.

Invariant: The phase only moves forward.

``snapshots`` starts attempts and handles their end; files are written by ``snapshot_io``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Final

from psdist.errors import LimitExceededError, SnapshotFailedError
from psdist.snapshots.format import Manifest, ParametersState, WorkerState, state_file_name
from psdist.wire import limits
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_events import AttemptProgress
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member, name_some
from psdist_scheduler.decide.effects import Answer, Effect
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet

#: Up to this number of steps it is not clear whether parameter sets are trained in step.
_UNEVEN_STEPS: Final = 2


class AttemptPhase(IntEnum):
    """Progress of an attempt. Without workers to ask, cutting follows preparing."""

    PREPARING = auto()
    MARKING = auto()
    CUTTING = auto()
    COMMITTING = auto()


@dataclass(frozen=True, slots=True)
class DueSnapshot:
    """A snapshot to take.

    steps: step of its cut, by BSP parameter set.
    ahead: True if its step is far in the future, and nobody waits for it.
    """

    steps: dict[str, int]
    reason: str
    ahead: bool = False


@dataclass(slots=True)
class Attempt:
    """The attempt in progress.

    number: higher than that of any earlier attempt.
    directory: directory of its files in the storage.
    parameters: parameter sets that are saved, by name, in the manifest's order.
    uploads: worker states that are handed in for it.
    began, moved: times of its start and of its last progress, in seconds.
    """

    number: int
    directory: str
    due: DueSnapshot
    parameters: dict[str, ParameterSet]
    uploads: WorkerStateUploads
    began: float
    moved: float = field(init=False)
    phase: AttemptPhase = AttemptPhase.PREPARING
    #: Answer of each primary, True if it accepted; None until it answers.
    servers: dict[str, bool | None] = field(init=False)
    #: Next pushes of each worker whose pushes are marked; None until it answers.
    marks: dict[Identity, dict[str, int] | None] = field(init=False)
    #: Version, and primary and term of each shard, at the start of the attempt, by parameter set.
    _initial: dict[str, tuple[int, tuple[object, ...]]] = field(init=False)
    #: Time at which all files were written.
    whole_at: float | None = None
    #: Workers that may have used data before the cut without having reported it.
    undecided: list[str] = field(default_factory=list)
    written: dict[tuple[str, int], sn.Written] = field(default_factory=dict)
    progress: dict[str, AttemptProgress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moved = self.began
        self.servers = {server: None for p in self.parameters.values() for server in p.entry.primaries}
        self.marks = dict.fromkeys(_members_to_mark(self))
        self._initial = {name: (p.version, _route(p)) for name, p in self.parameters.items()}

    # --- the cut ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, int]:
        """Step of the cut, by BSP parameter set."""
        return self.due.steps

    @property
    def marked(self) -> tuple[str, ...]:
        """Names of the parameter sets whose pushes are marked."""
        return tuple(name for name in self.parameters if name not in self.steps)

    @property
    def step(self) -> int:
        """The highest step, for people."""
        return max((self.steps.get(name, p.version) for name, p in self.parameters.items()), default=0)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the parameter sets without a slice at the cut."""
        return tuple(name for name, p in self.parameters.items() if p.version < self.steps.get(name, 0))

    @property
    def is_uneven(self) -> bool:
        """True if parameter sets that were to reach the cut together are not trained in step.

        Some have then made less than half the steps of others since. The servers' reports are not simultaneous.
        """
        began = {name: version for name, (version, _) in self._initial.items()}
        made = [p.version - began[name] for name, p in self.parameters.items() if self.steps.get(name, 0) > began[name]]
        return bool(made) and max(made) > _UNEVEN_STEPS and 2 * min(made) < max(made)

    @property
    def changed(self) -> str:
        """Why the cut is no longer valid; empty if it is."""
        for name, p in self.parameters.items():
            if p.record is None or _route(p) != self._initial[name][1]:
                return f"shards of {name!r} have other primaries"
        differing = _members_to_mark(self).keys() ^ self.marks.keys()
        if differing and not self.is_whole:
            who = name_some(sorted({worker for worker, _ in differing}))
            return f"{who} joined or left, whose pushes are marked"
        return ""

    def bound(self, worker: Identity) -> dict[str, int]:
        """Return the number below which this worker's pushes are in the snapshot, by parameter set.

        Without the sets of SSP and ASP for a worker whose pushes are not marked. It has left, and all of them are in
        the snapshot.
        """
        if worker not in self.marks:
            return self.steps
        marks = self.marks[worker] or {}
        return {name: self.steps.get(name, marks.get(name, 0)) for name in self.parameters}

    # --- progress -----------------------------------------------------------------------------------------------------

    @property
    def reached(self) -> bool:
        """True if each parameter set was seen at the cut, so that hardly any more pushes are needed for it."""
        begun = {name for name, _ in self.written}
        is_cut = self.phase >= AttemptPhase.CUTTING and begun.issuperset(self.unseen)
        return is_cut and (bool(begun) or not self.is_held)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes written, and bytes to write, as last reported by the servers."""
        return sum(p.done for p in self.progress.values()), sum(p.total for p in self.progress.values())

    @property
    def is_whole(self) -> bool:
        """True if all files are written. Workers may come and go from then on."""
        return self.phase >= AttemptPhase.CUTTING and not self.missing and not self.uploads.missing

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Shards whose files are not written yet, by parameter set and number."""
        shards = [(name, number) for name, (_, route) in self._initial.items() for number in range(len(route))]
        return [shard for shard in shards if shard not in self.written]

    @property
    def is_held(self) -> bool:
        """True if a server reports that it is waiting for something."""
        return any(progress.waiting_for for progress in self.progress.values())

    @property
    def workers(self) -> dict[Identity, None]:
        """Workers that are asked for marks or for their state."""
        return dict.fromkeys((*self.marks, *self.uploads.answers))

    @property
    def unanswered(self) -> list[Identity]:
        """Workers that were asked and have not answered."""
        marks, answers = self.marks, self.uploads.answers
        return [worker for worker in self.workers if marks.get(worker, {}) is None or not answers.get(worker, True)]

    @property
    def waiting_for(self) -> str:
        """Reason for the wait, as text that begins with "for"."""
        match self.phase:
            case AttemptPhase.PREPARING:
                return f"for {name_some([s for s, answer in self.servers.items() if answer is None])} to agree on a cut"
            case AttemptPhase.MARKING:
                return f"for {name_some([worker for worker, _ in self.unanswered])} to mark its pushes"
            case AttemptPhase.COMMITTING:
                return "for the storage to take the manifest and the commit record"
        if not self.reached and self.steps:
            return f"for {' and '.join(f'step {step} of {name!r}' for name, step in self.steps.items())}"
        if text := next((p.waiting_for for p in self.progress.values() if p.waiting_for), ""):
            return text
        if missing := self.missing:
            sets = self.parameters
            late = [sets[name].entry.primaries[n] if sets[name].record else "a server" for name, n in missing]
            return f"for {name_some(list(dict.fromkeys(late)))} to write"
        if self.uploads.missing:
            return self.uploads.waiting_for
        return f"for {name_some(self.undecided)} to report the data it has used"

    def validate(self) -> None:
        assert self.phase is AttemptPhase.COMMITTING or not self.changed
        assert (None in self.servers.values()) <= (self.phase is AttemptPhase.PREPARING)
        assert self.phase <= AttemptPhase.MARKING or None not in self.marks.values()
        assert bool(self.missing) <= (self.phase < AttemptPhase.COMMITTING)

    # --- reports ------------------------------------------------------------------------------------------------------

    def awaits(self, server: str) -> bool:
        """Return True if a server was asked for the cut and has not answered."""
        return self.phase is AttemptPhase.PREPARING and self.servers.get(server, False) is None

    def on_marked(self, event: sn.Marked, worker: Identity) -> dict[str, int]:
        """Record a worker's marks; its first answer counts.

        Returns the steps to use instead if its state is no longer available at the cut.
        """
        if worker in self.marks and self.marks[worker] is None:
            self.marks[worker] = dict(event.next)
        return self.uploads.on_marked(worker, event, self.steps)

    def on_written(self, event: sn.Written, server: str) -> None:
        """Record a durable file. It counts only if the shard's primary of this term wrote it."""
        if self.phase is not AttemptPhase.CUTTING or event.parameters not in self.parameters:
            return
        shards = self.parameters[event.parameters].entry.shards
        shard = shards[event.shard] if 0 <= event.shard < len(shards) else None
        if shard is not None and shard.primary.server_id == server and shard.term == event.term:
            self.written[event.parameters, event.shard] = event

    def takes_states_of(self, number: int, now: float) -> bool:
        """Return True if states that were handed in for this attempt may be in it. That is progress."""
        takes = self.phase in (AttemptPhase.MARKING, AttemptPhase.CUTTING) and number == self.number
        self.moved = now if takes else self.moved
        return takes

    def on_progress(self, server: str, progress: AttemptProgress, now: float) -> None:
        """Record the progress in a server's heartbeat."""
        if progress.attempt == self.number and server in self.servers:
            if self.progress.get(server) != progress:
                self.moved = now
            self.progress[server] = progress

    # --- commands -----------------------------------------------------------------------------------------------------

    def prepare(self, servers: Iterable[str], members: Membership) -> list[Effect]:
        """Return the request for the cut, to those of the servers that have a session."""
        steps = tuple((name, self.steps.get(name, 0)) for name in self.parameters)
        return members.tell(servers, sn.Prepare(self.number, self.directory, steps))

    def mark(self, workers: Iterable[Identity], members: Membership) -> list[Effect]:
        """Enter the marking phase. Returns the request for marks, to those of the workers that have a session."""
        self.enter(AttemptPhase.MARKING)
        steps = tuple(sorted(self.steps.items()))
        return members.tell((worker for worker, _ in workers), sn.Mark(self.number, steps))

    def take_cut(self, members: Membership, known: Mapping[str, int]) -> list[Effect]:
        """Enter the cutting phase. Returns the command to write.

        known: highest step that any slice is at, by BSP parameter set.
        """
        self.enter(AttemptPhase.CUTTING)
        producers = tuple((name, next_pushes(self, name, by_origin=True)) for name in self.marked)
        left = [name for name, p in self.parameters.items() if name in self.steps and not p.entry.members]
        final = tuple((name, self.steps[name]) for name in left if self.steps[name] == known.get(name))
        return members.tell(self.servers, sn.TakeCut(self.number, producers, final))

    def end(self, committed: bool, reason: str, members: Membership) -> list[Effect]:
        """Return the news of the attempt's end, to everyone who was asked."""
        workers = [worker for worker, _ in self.workers]
        return members.tell([*self.servers, *workers], sn.End(self.number, committed, reason))

    def enter(self, phase: AttemptPhase) -> None:
        """Move forward to ``phase``."""
        assert self.phase <= phase, f"{self.phase.name} does not go back to {phase.name}"
        self.phase = phase


def next_pushes(attempt: Attempt, name: str, *, by_origin: bool) -> sn.Producers:
    """Return the next push of each member of a parameter set whose pushes are marked.

    by_origin: True to name members by origin, as servers know pushes; False to name them by incarnation, with those
        that have left since they answered.
    """
    if not by_origin:
        return tuple((*worker, marks[name]) for worker, marks in attempt.marks.items() if marks and name in marks)
    return tuple(
        (m.worker_id, m.producer[1], (attempt.marks[m.worker_id, m.incarnation] or {}).get(name, 0))
        for m in attempt.parameters[name].entry.members
    )


def _members_to_mark(attempt: Attempt) -> dict[Identity, None]:
    """Return the workers whose pushes are to be marked, as of now, each once."""
    marked = (attempt.parameters[name] for name in attempt.marked)
    return {m.identity: None for p in marked for m in p.entry.members}


def _route(p: ParameterSet) -> tuple[object, ...]:
    return tuple((shard.primary, shard.term, shard.lost) for shard in p.entry.shards)


# --- worker states of one attempt -------------------------------------------------------------------------------------
#
# A worker with state of its own is asked before the cut is final, as are those whose pushes are marked. It answers
# with the push before which the state can be taken. Its file is written while servers write theirs, and the snapshot
# is committed when all of them are durable. An attempt does not wait for a worker that is lost meanwhile.
#
# Invariants: There is at most one file per parameter set and rank. An accepted state was requested, comes from the
# incarnation that was asked, and is from before the push that the cut names.


@dataclass(slots=True)
class WorkerStateUploads:
    """Worker states that one attempt requests, and those that arrived.

    answers: True by worker once it has answered.
    numbers: position of each parameter set in the manifest, by name.
    """

    answers: dict[Identity, bool] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    #: Push before which the state is taken, by worker and parameter set.
    _wanted: dict[tuple[Identity, str], int] = field(default_factory=dict)
    _taken: dict[tuple[Identity, str], WorkerState] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for worker, _ in self.answers)

    @property
    def missing(self) -> bool:
        """True if a state is still to be handed in."""
        return not self._wanted.keys() <= self._taken.keys()

    @property
    def waiting_for(self) -> str:
        """Reason for the wait, as text that begins with "for"."""
        workers = {worker for (worker, _), _ in self._wanted.keys() - self._taken.keys()}
        return f"for {name_some(sorted(workers))} to hand in its state"

    @property
    def files(self) -> tuple[WorkerState, ...]:
        """States for the manifest."""
        return tuple(sorted(self._taken.values(), key=lambda state: state.file))

    def on_marked(self, worker: Identity, event: sn.Marked, steps: Mapping[str, int]) -> dict[str, int]:
        """Record a worker's answer. Returns the steps to use instead if the worker has already passed the cut.

        A worker that was asked for its marks alone, because it had not announced its states yet, may name some.

        steps: step of the cut, by BSP parameter set.
        """
        if self.answers.get(worker, not event.keeps):
            return {}
        self.answers[worker] = True
        early = {key: self._taken.pop(key) for key in list(self._taken) if key[0] == worker}
        pushes, later = dict(event.next), dict[str, int]()
        for name, lowest in event.keeps:
            before = steps.get(name, pushes.get(name, 0))
            if name in self.numbers:
                self._wanted[worker, name] = before
                if (state := early.get((worker, name))) is not None and state.next == before:
                    self._taken[worker, name] = state
            if lowest > before and name in steps:
                later[name] = lowest
        return later

    def do_without(self, worker: Identity, names: Iterable[str]) -> None:
        """Stop waiting for a worker's states of these parameter sets."""
        for name in names:
            self._wanted.pop((worker, name), None)

    def forget(self, is_live: Callable[[str, int], bool]) -> None:
        """Stop waiting for workers that are gone. States that they sent are kept if an answer named them."""
        for worker in [worker for worker in self.answers if not is_live(*worker)]:
            del self.answers[worker]
            for key in [key for key in self._wanted if key[0] == worker and key not in self._taken]:
                del self._wanted[key]
            for key in [key for key in self._taken if key[0] == worker and key not in self._wanted]:
                del self._taken[key]

    def place(self, worker: Member, event: sn.StateOffered, directory: str) -> sn.StatePlace:
        """Return where to write a file; nowhere if it exists already. Raises LimitExceededError, and
        SnapshotFailedError if it is not wanted."""
        if event.length > limits.STATE_BYTES_MAX:
            raise LimitExceededError(
                f"a state of {event.length} bytes is over the limit of {limits.STATE_BYTES_MAX}: save less"
            )
        key = worker.identity, event.parameters
        if not self._takes(key, event.next):
            raise SnapshotFailedError(
                f"the state of {event.parameters!r} before push {event.next} is not the one that the snapshot needs"
            )
        file = state_file_name(self.numbers[event.parameters], worker.rank)
        return sn.StatePlace(directory, "" if key in self._taken else file, worker.rank)

    def on_written(self, event: sn.StateWritten) -> None:
        key = event.worker, event.state.parameters
        if self._takes(key, event.state.next):
            self._taken.setdefault(key, event.state)

    def _takes(self, key: tuple[Identity, str], before: int) -> bool:
        """Return True if the state before this push is wanted, or may be.

        A file may arrive before the answer that names it, since these are two calls.
        """
        is_early = self.answers.get(key[0]) is False and key[1] in self.numbers
        return is_early or self._wanted.get(key) == before


# --- workers that save state ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WorkerStateRegistry:
    """Workers that save state of their own, and the parameter sets that it belongs to."""

    _members: Membership
    _names: dict[Identity, tuple[str, ...]] = field(default_factory=dict)

    def live_owners(self, parameters: Iterable[ParameterSet]) -> list[Identity]:
        """Return live members of these parameter sets that save state for them."""
        self._names = {worker: names for worker, names in self._names.items() if self._members.is_live(*worker)}
        members = [(p.name, m.identity) for p in parameters for m in p.entry.members]
        return list(dict.fromkeys(worker for name, worker in members if name in self._names.get(worker, ())))

    def are_new(self, attempt: Attempt) -> bool:
        """Return True if a worker saves state that the attempt did not ask."""
        owners = self.live_owners(attempt.parameters.values()) if self._names else ()
        return any(worker not in attempt.uploads.answers for worker in owners)

    def on_announced(self, event: sn.StatesAnnounced) -> list[Effect]:
        """Record the parameter sets for which a worker saves state."""
        if (member := self._members.by_session(event.call)) is not None:
            self._names[member.identity] = event.parameters
        return []

    def on_offered(self, event: sn.StateOffered, worker: Member, attempt: Attempt | None, now: float) -> list[Effect]:
        """Process a worker's request to hand in a file. Raises SnapshotFailedError and LimitExceededError."""
        if attempt is None or not attempt.takes_states_of(event.attempt, now):
            raise SnapshotFailedError("no snapshot in progress needs the state of this worker")
        return [Answer(event.call, attempt.uploads.place(worker, event, attempt.directory))]

    def on_written(self, event: sn.StateWritten, attempt: Attempt | None, now: float) -> list[Effect]:
        """Process a durable file of a worker."""
        if attempt is not None and attempt.takes_states_of(event.attempt, now):
            attempt.uploads.on_written(event)
        return []

    def get(self, event: sn.GetState, worker: Member, found: sn.CommitFound | None) -> list[Effect]:
        """Return what the worker's rank handed in for the snapshot ``found``."""
        if found is None:
            return [Answer(event.call, sn.StateSource())]
        state = found.manifest.worker_state(event.parameters, worker.rank)
        return [Answer(event.call, sn.StateSource(found.manifest, state))]


# --- manifest ---------------------------------------------------------------------------------------------------------


def make_manifest(
    attempt: Attempt, settings: ClusterSettings, members: Membership, datasets: Datasets, epoch: int
) -> Manifest:
    """Return the manifest. Raises InvalidArgumentError and SnapshotFailedError if the servers' reports are not a
    consistent snapshot."""
    return Manifest(
        run_id=settings.run_id,
        directory=attempt.directory,
        epoch=epoch,
        time=0.0,
        reason=attempt.due.reason,
        configuration={
            "workers": len(members.workers),
            "servers": len(members.servers),
            "replicas": settings.replicas,
            "policy": settings.policy.text,
        },
        parameters=tuple(_state(attempt, p) for p in attempt.parameters.values()),
        datasets=datasets.states(attempt.bound),
        states=attempt.uploads.files,
    )


def _state(attempt: Attempt, p: ParameterSet) -> ParametersState:
    parts = [attempt.written[p.name, number] for number in range(len(p.entry.shards))]
    names = {part.state_names for part in parts}
    if len(names) > 1:
        raise SnapshotFailedError(f"servers disagree on the optimizer's arrays of {p.name!r}: {sorted(names)}")
    versions = [version for part in parts for version in part.file.versions]
    step = attempt.steps.get(p.name)
    if step is not None and any(version != step for version in versions):
        raise SnapshotFailedError(
            f"slices of {p.name!r} were written at versions {min(versions)} to {max(versions)}, not at the cut's step "
            f"{step}"
        )
    return ParametersState(
        spec=p.entry.spec,
        layout=p.placed.layout,
        reference_workers=p.entry.reference_workers,
        state_names=parts[0].state_names,
        step=max(versions, default=0) if step is None else step,
        next=next_pushes(attempt, p.name, by_origin=False) if step is None else (),
        shards=tuple(part.file for part in parts),
        state_since=p.entry.state_since,
    )
