"""Events, answers, commands and effects for snapshots: frozen dataclasses.

Reports of members and callers come in. Commands go out on sessions, as an ``Answer`` or a ``Broadcast`` of
``cluster_events``. Work on the storage goes out as an effect, which ``snapshot_io`` carries out one after another, and
its result comes back as an event. ``cluster_events`` has everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist.snapshots.format import CommitRecord, Manifest, ShardFile, WorkerState
from psdist.types import Restore
from psdist_scheduler.events.records import Identity

#: By parameters: a step, or the number of a worker's next push.
Numbers = tuple[tuple[str, int], ...]
#: (worker_id, incarnation, next push).
Producers = tuple[tuple[str, int, int], ...]

#: Reason of the snapshot that the end of a run takes.
AT_THE_END: Final = "at the end"


@dataclass(frozen=True)
class CommitFound:
    """A committed snapshot that can be read."""

    commit: CommitRecord
    manifest: Manifest


@dataclass(frozen=True)
class History:
    """What the storage holds.

    commits: records that could be read, the newest first. highest: the highest number of any record, 0 for none.
    newest: the newest snapshot that can be read. skipped: one sentence for each newer one, and why it cannot.
    base: the snapshot that was asked for, if it can be read.
    """

    commits: tuple[CommitRecord, ...] = ()
    highest: int = 0
    newest: CommitFound | None = None
    skipped: tuple[str, ...] = ()
    base: CommitFound | None = None


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """How far a server is with a snapshot; in its heartbeats."""

    attempt: int
    done: int
    total: int
    aside: int
    waiting_for: str = ""
    loading: bool = False


# --- events: calls and reports of members -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Somebody wants a snapshot. A ``worker_id`` makes no push until it is answered, and ``next`` has its next ones."""

    call: int
    run_id: str
    reason: str = ""
    worker_id: str = ""
    incarnation: int = 0
    next: Numbers = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server, on its session ``call``, has armed the cut, or cannot. ``steps_next``: steps that no slice passed."""

    call: int
    attempt: int
    accepted: bool
    steps_next: Numbers = ()


@dataclass(frozen=True, slots=True)
class Marked:
    """A worker, on its session ``call``, marks its pushes from ``next`` on. ``keeps``: parameters whose state it hands
    in, and the lowest push before which it can."""

    call: int
    attempt: int
    next: Numbers = ()
    keeps: Numbers = ()


@dataclass(frozen=True, slots=True)
class Keeps:
    """A worker, on its session ``call``, keeps a state of these parameter sets."""

    call: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandIn:
    """A worker has the state of a parameter set before push ``next``, a file of ``length`` bytes; where does it go?"""

    call: int
    run_id: str
    worker_id: str
    incarnation: int
    attempt: int
    parameters: str
    next: int
    length: int


@dataclass(frozen=True, slots=True)
class HandedIn:
    """That file is durable."""

    attempt: int
    worker: Identity
    state: WorkerState


@dataclass(frozen=True, slots=True)
class GetState:
    """A worker wants back what its rank handed in for the snapshot that parameters began from."""

    call: int
    run_id: str
    worker_id: str
    incarnation: int
    parameters: str


@dataclass(frozen=True, slots=True)
class Written:
    """A server, on its session ``call``: the file of a shard is durable."""

    call: int
    attempt: int
    parameters: str
    shard: int
    term: int
    file: ShardFile
    state_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A server, on its session ``call``, cannot take its part in the snapshot."""

    call: int
    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A server, on its session ``call``, has the values of shards from the snapshot."""

    call: int
    parameters: str
    generation: int
    shards: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A server, on its session ``call``, cannot load them. unreachable: the storage did not answer; otherwise something
    is wrong with this snapshot."""

    call: int
    parameters: str
    generation: int
    restore: Restore
    text: str
    unreachable: bool = False


#: What members report on their sessions.
SnapshotReport = Prepared | Marked | Keeps | Written | PartFailed | Loaded | LoadFailed

# --- events: what became of work on the storage -----------------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    """The snapshot exists."""

    attempt: int
    commit: CommitRecord
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The commit record was not created. ``replaced``: another scheduler has committed under the same number.
    ``unsure``: the storage did not answer, and it may exist all the same."""

    attempt: int
    text: str
    replaced: bool = False
    unsure: bool = False


@dataclass(frozen=True)
class Pruned:
    """These are deleted. ``error``: why no more are; empty if all are."""

    sequences: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True)
class HistoryRead:
    """The storage was read, or could not be for the reason in ``error``."""

    history: History | None
    error: str = ""


StorageEvent = Committed | CommitFailed | Pruned | HistoryRead
SnapshotEvent = Save | HandIn | HandedIn | GetState | SnapshotReport | StorageEvent

# --- answers, commands and news ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saving:
    """Not the last answer. The snapshot waits for ``text``; so many bytes of ``total`` are written."""

    text: str
    done: int
    total: int


@dataclass(frozen=True)
class Saved:
    """The snapshot is committed; ``unchanged``: it was before, and nothing was trained since."""

    commit: CommitRecord
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a worker's state of this ``rank`` is to be written; ``file`` is empty where it is written already."""

    directory: str
    file: str
    rank: int


@dataclass(frozen=True)
class StateSource:
    """Where what a worker handed in lies; None where it did not."""

    manifest: Manifest | None = None
    state: WorkerState | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a server, on its session. ``steps``: by parameters, the step of the cut; 0 where pushes are marked."""

    attempt: int
    directory: str
    steps: Numbers


@dataclass(frozen=True, slots=True)
class Mark:
    """To a worker, on its session: mark pushes from now on. ``steps``: of the cut, by BSP parameters."""

    attempt: int
    steps: Numbers = ()


@dataclass(frozen=True, slots=True)
class TakeCut:
    """To a server, on its session: write. ``next``: by parameter set whose pushes are marked, the next push of each
    producer. ``final``: by BSP parameters that no worker is left of, the step that some slice is at; others wait for
    none."""

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
    """To everyone: the run goes on from this snapshot. ``lost``: (parameters, first step that is lost, and the step
    after the last)."""

    directory: str
    lost: tuple[tuple[str, int, int], ...]
    text: str


SnapshotCommand = Prepare | Mark | TakeCut | End

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteCommit:
    """Make the manifest durable, then the commit record ``sequence``, which must not exist. The manifest's time and
    version are the writer's. ``seconds``: what the attempt took until now."""

    attempt: int
    sequence: int
    manifest: Manifest
    seconds: float


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """Remove what an attempt wrote that was given up before it could be committed."""

    directory: str


@dataclass(frozen=True)
class Prune:
    """Delete these snapshots, the commit records first. ``collect``: and then whatever no record names."""

    commits: tuple[CommitRecord, ...]
    collect: bool = False


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """Read what the storage holds. ``bad``: directories of snapshots that cannot be loaded."""

    base: str = ""
    bad: tuple[str, ...] = ()


StorageEffect = WriteCommit | RemoveDirectory | Prune | ReadHistory
