"""Events, answers, commands and effects for snapshots: frozen dataclasses.

Reports of members and callers arrive as events. Commands are sent on sessions, as an ``Answer`` or a ``Broadcast`` of
``cluster_events``. Work on the storage is an effect, which ``snapshot_io`` carries out in order, and its result returns
as an event. Everything else is in ``cluster_events``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist.snapshots.format import CommitRecord, Manifest, ShardFile, WorkerState
from psdist.types import Restore
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.cluster_events import Numbers
from psdist_scheduler.decide.cluster_state import Identity

#: (worker_id, incarnation, next push).
Producers = tuple[tuple[str, int, int], ...]

#: Reason of the snapshot that is taken at the end of a run.
AT_THE_END: Final = "at the end"


@dataclass(frozen=True)
class CommitFound:
    """A committed snapshot that can be read."""

    commit: CommitRecord
    manifest: Manifest


@dataclass(frozen=True)
class History:
    """Content of the storage.

    commits: readable records, newest first.
    highest: the highest number of any record; 0 for none.
    newest: the newest snapshot that can be read.
    skipped: one sentence for each newer snapshot, with the reason why it cannot be read.
    base: the requested snapshot, if it can be read.
    """

    commits: tuple[CommitRecord, ...] = ()
    highest: int = 0
    newest: CommitFound | None = None
    skipped: tuple[str, ...] = ()
    base: CommitFound | None = None


# --- events: calls and reports of members -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save(ev.RunCall):
    """A request for a snapshot. A worker that sends it makes no push until it is answered.

    caller: the worker; None for other callers.
    next: its next pushes.
    """

    reason: str = ""
    caller: ev.Caller | None = None
    next: Numbers = ()


@dataclass(frozen=True, slots=True)
class Prepared(ev.Call):
    """A server's answer, on its session ``call``: whether it has armed the cut.

    steps_next: steps that no slice has passed.
    """

    attempt: int
    accepted: bool
    steps_next: Numbers = ()


@dataclass(frozen=True, slots=True)
class Marked(ev.Call):
    """A worker's marks, on its session ``call``: its pushes from ``next`` on are not in the snapshot.

    keeps: parameter sets whose state it hands in, with the lowest push before which it can.
    """

    attempt: int
    next: Numbers = ()
    keeps: Numbers = ()


@dataclass(frozen=True, slots=True)
class StatesAnnounced(ev.Call):
    """A worker's announcement, on its session ``call``, that it saves state for these parameter sets."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateOffered(ev.WorkerCall):
    """A worker's request to hand in its state of a parameter set before push ``next``, as a file of ``length``
    bytes."""

    attempt: int
    parameters: str
    next: int
    length: int


@dataclass(frozen=True, slots=True)
class StateWritten(ev.Event):
    """The file of a worker's state is durable."""

    attempt: int
    worker: Identity
    state: WorkerState


@dataclass(frozen=True, slots=True)
class GetState(ev.WorkerCall):
    """A worker's request for the state that its rank handed in for the snapshot that parameters began from."""

    parameters: str


@dataclass(frozen=True, slots=True)
class Written(ev.Call):
    """A server's report, on its session ``call``, that the file of a shard is durable."""

    attempt: int
    parameters: str
    shard: int
    term: int
    file: ShardFile
    state_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartFailed(ev.Call):
    """A report on session ``call`` that a member cannot contribute its part of the snapshot."""

    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Loaded(ev.Call):
    """A server's report, on its session ``call``, that it has loaded shards from the snapshot."""

    parameters: str
    generation: int
    shards: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed(ev.Call):
    """A server's report, on its session ``call``, that it cannot load its shards from the snapshot.

    unreachable: True if the storage did not answer; otherwise something is wrong with this snapshot.
    """

    parameters: str
    generation: int
    restore: Restore
    text: str
    unreachable: bool = False


#: Reports of members on their sessions.
SnapshotReport = Prepared | Marked | StatesAnnounced | Written | PartFailed | Loaded | LoadFailed

# --- events: what became of work on the storage -----------------------------------------------------------------------


@dataclass(frozen=True)
class Committed(ev.Event):
    """The snapshot exists."""

    attempt: int
    commit: CommitRecord
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CommitFailed(ev.Event):
    """The commit record was not created.

    replaced: True if another scheduler has committed under the same number.
    unsure: True if the storage did not answer, so that the record may exist nevertheless.
    """

    attempt: int
    text: str
    replaced: bool = False
    unsure: bool = False


@dataclass(frozen=True)
class Pruned(ev.Event):
    """These snapshots are deleted. error: why no others are; empty if all are."""

    sequences: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True)
class HistoryRead(ev.Event):
    """The storage was read, or could not be read for the reason in ``error``."""

    history: History | None
    error: str = ""


StorageEvent = Committed | CommitFailed | Pruned | HistoryRead

# --- answers, commands and news ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saving:
    """Progress of a snapshot: the reason for the wait, and the bytes written so far. Other answers follow."""

    waiting_for: str
    bytes_done: int
    bytes: int


@dataclass(frozen=True)
class Saved:
    """The snapshot is committed. unchanged: True if it already was, and nothing was trained since."""

    committed: CommitRecord
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Place where a worker's state of this ``rank`` is to be written. file: empty if it is written already."""

    directory: str
    file: str
    rank: int


@dataclass(frozen=True)
class StateSource:
    """Place of a state that was handed in; None if there is none."""

    manifest: Manifest | None = None
    state: WorkerState | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a server, on its session: agree on a cut. steps: step of the cut by parameter set; 0 if pushes are marked."""

    attempt: int
    directory: str
    steps: Numbers


@dataclass(frozen=True, slots=True)
class Mark:
    """To a worker, on its session: mark the next pushes. steps: step of the cut, by BSP parameter set."""

    attempt: int
    steps: Numbers = ()


@dataclass(frozen=True, slots=True)
class TakeCut:
    """To a server, on its session: write.

    next: next push of each producer, by parameter set whose pushes are marked.
    final: step that some slice is at, by BSP parameter set without workers; other slices do not wait for it.
    """

    attempt: int
    next: tuple[tuple[str, Producers], ...]
    final: Numbers = ()


@dataclass(frozen=True, slots=True)
class End:
    """To a member, on its session: nothing waits for this attempt any more."""

    attempt: int
    committed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """To everyone: the run continues from this snapshot.

    lost: (parameter set, first lost step, step after the last lost one).
    """

    directory: str
    lost: tuple[tuple[str, int, int], ...]
    text: str


SnapshotCommand = Prepare | Mark | TakeCut | End

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteCommit:
    """Make the manifest durable, then the commit record.

    The writer sets the manifest's time and version.

    sequence: number of the commit record. If the storage has a record of this number, the commit fails.
    seconds: duration of the attempt so far.
    """

    attempt: int
    sequence: int
    manifest: Manifest
    seconds: float


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """Remove the files of an attempt that was given up before it could be committed."""

    directory: str


@dataclass(frozen=True)
class Prune:
    """Delete these snapshots, the commit records first. collect: True to delete afterwards whatever no record names."""

    commits: tuple[CommitRecord, ...]
    collect: bool = False


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read the content of the storage. bad: directories of snapshots that cannot be loaded."""

    base: str = ""
    bad: tuple[str, ...] = ()


StorageEffect = WriteCommit | RemoveDirectory | Prune | ReadHistory
