"""One attempt at a snapshot: its phase, the answers so far, and the files written. Pure.

An attempt asks the servers whether they can take the cut (*preparing*). In SSP and ASP, and if workers save state of
their own, it asks those workers for their next pushes (*marking*). Then the servers write (*cutting*). When everything
is durable, the storage gets the manifest and the commit record (*committing*).

Invariant: The phase only moves forward.

``attempt_runner`` starts attempts and handles their end; ``cut`` defines the content of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto

from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Answer, Effect
from psdist_scheduler.events.cluster_state import Identity, name_some
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.snapshots.cut import AgreedCut
from psdist_scheduler.snapshots.worker_states import WorkerStateUploads


class AttemptPhase(IntEnum):
    """Progress of an attempt. Without workers to ask, cutting follows preparing."""

    PREPARING = auto()
    MARKING = auto()
    CUTTING = auto()
    COMMITTING = auto()


@dataclass(slots=True)
class Attempt:
    """The attempt in progress.

    number: higher than that of any earlier attempt.
    directory: directory of its files in the storage.
    ahead: True if its step is far in the future, and nobody waits for it.
    kept: worker states that are handed in for it.
    began, moved: times of its start and of its last progress, in seconds.
    """

    number: int
    directory: str
    reason: str
    ahead: bool
    cut: AgreedCut
    kept: WorkerStateUploads
    began: float
    moved: float = field(init=False)
    phase: AttemptPhase = AttemptPhase.PREPARING
    #: Answer of each server, True if it accepted; None until it answers.
    servers: dict[str, bool | None] = field(init=False)
    #: Time at which all files were written.
    whole_at: float | None = None
    #: Workers that may have used data before the cut without having reported it.
    undecided: list[str] = field(default_factory=list)
    written: dict[tuple[str, int], sn.Written] = field(default_factory=dict)
    progress: dict[str, sn.AttemptProgress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moved = self.began
        self.servers = dict.fromkeys(self.cut.servers)

    @property
    def reached(self) -> bool:
        """True if each parameter set was seen at the cut, so that hardly any more pushes are needed for it."""
        begun = {name for name, _ in self.written}
        is_cut = self.phase >= AttemptPhase.CUTTING and begun.issuperset(self.cut.ahead)
        return is_cut and (bool(begun) or not self.is_held)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes written, and bytes to write, as last reported by the servers."""
        return sum(p.done for p in self.progress.values()), sum(p.total for p in self.progress.values())

    @property
    def stage(self) -> str:
        """ "cutting", "writing" or "committing", for people."""
        if self.phase is AttemptPhase.COMMITTING:
            return "committing"
        return "writing" if self.written or self.bytes[0] else "cutting"

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Shards whose files are not written yet."""
        return [shard for shard in self.cut.shards if shard not in self.written]

    @property
    def is_whole(self) -> bool:
        """True if all files are written and the commit has not started."""
        return self.phase is AttemptPhase.CUTTING and not self.missing and not self.kept.missing

    @property
    def is_held(self) -> bool:
        """True if a server reports that it is waiting for something."""
        return any(progress.waiting_for for progress in self.progress.values())

    def is_handed_to(self, attempt: int) -> bool:
        """Return True if workers may hand in their states for this attempt now."""
        return attempt == self.number and self.phase in (AttemptPhase.MARKING, AttemptPhase.CUTTING)

    @property
    def workers(self) -> dict[Identity, None]:
        return dict.fromkeys((*self.cut.marks, *self.kept.answers))

    @property
    def unanswered(self) -> list[Identity]:
        """Workers that were asked and have not answered."""
        marks, answers = self.cut.marks, self.kept.answers
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
        if not self.reached and self.cut.steps:
            return f"for {' and '.join(f'step {step} of {name!r}' for name, step in self.cut.steps.items())}"
        if text := next((p.waiting_for for p in self.progress.values() if p.waiting_for), ""):
            return text
        if not self.missing and self.kept.missing:
            return self.kept.waiting_for
        if not self.missing:
            return f"for {name_some(self.undecided)} to say what data it has used"
        late = dict.fromkeys(self.cut.primary(name, number) for name, number in self.missing)
        return f"for {name_some(list(late))} to write"

    def validate(self) -> None:
        assert self.phase is AttemptPhase.COMMITTING or not self.cut.changed
        assert (None in self.servers.values()) <= (self.phase is AttemptPhase.PREPARING)
        assert self.phase <= AttemptPhase.MARKING or None not in self.cut.marks.values()
        assert bool(self.missing) <= (self.phase < AttemptPhase.COMMITTING)

    def touch(self, now: float) -> None:
        self.moved = now

    def awaits(self, server: str) -> bool:
        """Return True if a server was asked for the cut and has not answered."""
        return self.phase is AttemptPhase.PREPARING and self.servers.get(server, False) is None

    def on_prepared(self, event: sn.Prepared, server: str) -> None:
        self.servers[server] = event.accepted

    def on_marked(self, event: sn.Marked, worker: Identity) -> dict[str, int]:
        """Record a worker's marks. Returns the steps to use instead if its state is no longer available at the cut."""
        self.cut.mark(worker, dict(event.next))
        return self.kept.on_marked(worker, event, self.cut.steps)

    def on_written(self, event: sn.Written, server: str) -> None:
        """Record a durable file. It counts only if the shard's primary of this term wrote it."""
        if self.phase is AttemptPhase.CUTTING and self.cut.is_primary(server, event):
            self.written[event.parameters, event.shard] = event

    def on_progress(self, server: str, progress: sn.AttemptProgress, now: float) -> None:
        """Record the progress in a server's heartbeat."""
        if progress.attempt == self.number and server in self.servers:
            if self.progress.get(server) != progress:
                self.moved = now
            self.progress[server] = progress

    def wait_for_data(self, undecided: list[str], now: float) -> float:
        """Note that all files are written, but that these workers may yet report data used before the cut.

        Returns for how long, in seconds, they have been waited for.
        """
        self.whole_at = now if self.whole_at is None else self.whole_at
        self.undecided = undecided
        return now - self.whole_at

    def prepare(self, servers: Iterable[str], members: Membership) -> list[Effect]:
        """Return the request for the cut, to those of the servers that have a session."""
        steps = tuple((name, self.cut.steps.get(name, 0)) for name in self.cut.names)
        return _send(servers, sn.Prepare(self.number, self.directory, steps), members)

    def mark(self, workers: Iterable[Identity], members: Membership) -> list[Effect]:
        """Enter the marking phase. Returns the request for marks, to those of the workers that have a session."""
        self._enter(AttemptPhase.MARKING)
        steps = tuple(sorted(self.cut.steps.items()))
        return _send((worker for worker, _ in workers), sn.Mark(self.number, steps), members)

    def take_cut(self, members: Membership, known: Mapping[str, int]) -> list[Effect]:
        """Enter the cutting phase. Returns the command to write.

        known: highest step that any slice is at, by BSP parameter set.
        """
        self._enter(AttemptPhase.CUTTING)
        steps = self.cut.steps
        producers = tuple((name, self.cut.producers(name, by_origin=True)) for name in self.cut.marked)
        left = [p.name for p in self.cut.parameters if p.name in steps and not p.entry.members]
        final = tuple((name, steps[name]) for name in left if steps[name] == known.get(name))
        return _send(self.servers, sn.TakeCut(self.number, producers, final), members)

    def commit(self) -> None:
        """Enter the committing phase."""
        self._enter(AttemptPhase.COMMITTING)

    def end(self, committed: bool, reason: str, members: Membership) -> list[Effect]:
        """Return the news of the attempt's end, to everyone who was asked."""
        workers = [worker for worker, _ in self.workers]
        return _send([*self.servers, *workers], sn.End(self.number, committed, reason), members)

    def _enter(self, phase: AttemptPhase) -> None:
        assert self.phase <= phase, f"{self.phase.name} does not go back to {phase.name}"
        self.phase = phase


def _send(to: Iterable[str], command: sn.SnapshotCommand, members: Membership) -> list[Effect]:
    sessions = [members.sessions.of(member) for member in dict.fromkeys(to)]
    return [Answer(session, command) for session in sessions if session]
