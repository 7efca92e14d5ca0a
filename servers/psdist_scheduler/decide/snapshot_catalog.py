"""Catalog of the run's committed snapshots, and the one that its parameter sets start from. Pure.

A snapshot exists if the storage has its commit record. Until the storage answers, nobody knows whether it has; after an
ambiguous answer (a time limit, a broken connection) the storage is read. ``doubt`` is set until this is known, and
decisions that depend on the newest snapshot wait (``losses``).

Invariants: ``commits`` lists the newest first, each number once, none above ``highest``. One commit is in progress at a
time, so that no two are sent under one number. The next record's number is one above the highest ever seen. A scheduler
that finds it taken saves no more. ``newest`` belongs to the current history of the run (``Resume``).

``snapshot_io`` accesses the storage.

``Resume`` is the starting point of the run's parameter sets: nothing, or the snapshot that the run resumed from or
rolled back to. A parameter set that is in the snapshot takes its slicing, step and values from there. No worker uploads
any: each server loads the shards whose primary it is, and reports them. The other settings are the workers', and
``notice`` names what differs from the snapshot. A parameter set with another name starts afresh, which ``notice``
reports as well.

With ``reset_optimizer`` the optimizer's state starts afresh too, once per run. Rolling back to a snapshot that the run
took itself resets nothing again. Snapshots that the run did not take itself have epochs before ``RestorePoint.began``.
Those that it took record in their settings whether a reset was requested.

Invariants: A parameter set is refused if it has other tensors, or settings that the values in the snapshot do not
allow. One with another name is refused before any set of the snapshot was requested. A shard counts as loaded only
after the primary of its current term has reported it.

Placing is done by ``parameter_sets``; ``snapshot_schedule`` decides when snapshots are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from psdist.changes import changes
from psdist.consistency import BSP
from psdist.errors import LayoutMismatchError, PsdistError, SettingsMismatchError, StorageError
from psdist.snapshots.format import CommitRecord, DatasetState, ParametersState
from psdist.snapshots.policy import SavePolicy
from psdist.types import DatasetSpec, Layout, ParametersEntry, ParametersSpec, Restore
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import RestorePoint, group, name_some
from psdist_scheduler.decide.effects import Effect, LogEvent
from psdist_scheduler.decide.snapshot_events import CommitFound, Loaded

#: Longest wait in seconds, after a rollback, for as many servers as there were.
SERVERS_GRACE_SECONDS: Final = 10.0
#: Longest wait in seconds, after a rollback, for the workers that the run needs. Nobody knows whether a missing worker
#: had finished, and the present ones would have continued without it.
WORKERS_GRACE_SECONDS: Final = 60.0
_REMEDY: Final = "pass the saved settings, or start afresh under another --run-id or with another --storage-path"


class Resume:
    """The snapshot that this run starts from, and its loading.

    since: time of the rollback; None if the run did not roll back.
    found: the snapshot, once it is known.
    """

    def __init__(self, base: RestorePoint, since: float | None = None) -> None:
        self.base = base
        self.since = since
        self.found: CommitFound | None = None
        self._known = False
        #: True if it changed since ``take_change``.
        self.changed = False
        #: Why the run cannot continue, neither from here nor from a snapshot; None while it can.
        self.failed: PsdistError | None = None
        self._loaded: dict[str, dict[tuple[int, int], None]] = {}

    @property
    def unread(self) -> bool:
        """True if the run starts from a snapshot that was not read yet."""
        return self.base.restore is not None and not self._known

    def state(self, name: str) -> ParametersState | None:
        """Return the snapshot's state of this parameter set."""
        return self.found.manifest.state(name) if self.found is not None else None

    @property
    def incarnations(self) -> int:
        """Highest incarnation of a worker in the snapshot; 0 for none."""
        states = self.found.manifest.parameters if self.found is not None else ()
        return max((incarnation for state in states for _, incarnation, _ in state.next), default=0)

    def first_step(self, spec: ParametersSpec) -> int:
        """Return the first step of the members of a loaded parameter set."""
        state = self.state(spec.name)
        return state.step if state is not None and isinstance(spec.consistency, BSP) else 0

    def check(self, spec: ParametersSpec, layout: Layout, others: Iterable[str]) -> None:
        """Raise SettingsMismatchError or LayoutMismatchError if these settings cannot use the values of the snapshot.

        others: names of the parameter sets that were requested before.
        """
        state = self.state(spec.name)
        if self.found is None:
            return
        if state is None:
            if self.since is None and not any(self.state(name) for name in others):
                raise self._foreign(spec.name)
            return
        whose = f"{spec.name!r} as snapshot {self.found.commit.directory} has it"
        if state.layout != layout:
            difference = state.layout.difference(layout)
            raise LayoutMismatchError(f"layout differs from {whose}: {difference}; {_REMEDY}")
        if difference := _slicing_difference(state, spec):
            raise SettingsMismatchError(f"settings differ from {whose}: {difference}; {_REMEDY}")
        needing = [f"{change}" for change in changes(state.spec, spec) if change.needs_reset]
        if needing and not spec.reset_optimizer:
            raise SettingsMismatchError(
                f"settings differ from {whose}: {'; '.join(needing)}. The optimizer's state there is of no use with "
                "that: pass reset_optimizer=True to client.parameters(), or to DistributedOptimizer or offload of "
                "psdist.torch, on every worker, which resets the optimizer's state and keeps the snapshot's weights; "
                f"or {_REMEDY}"
            )

    def _foreign(self, name: str) -> SettingsMismatchError:
        """Return the error for a script that seems to be another than the one that took the snapshot.

        At its end nothing could be saved, because a snapshot contains all parameter sets of the one before.
        """
        assert self.found is not None
        there = name_some([repr(state.spec.name) for state in self.found.manifest.parameters])
        return SettingsMismatchError(
            f"the run resumes from snapshot {self.found.commit.directory}, which has {there} and not {name!r}: is this "
            "another script? Start it under another --run-id or with another --storage-path. A parameter set resumes "
            "under the name that it was saved by, and one that is new in this run is created after those of the "
            "snapshot"
        )

    def resets(self, spec: ParametersSpec) -> bool:
        """True if the optimizer's state is reset. Snapshots taken by this run were reset before, if that was
        requested."""
        state = self.state(spec.name)
        if state is None or self.found is None or not spec.reset_optimizer:
            return False
        is_done = self.found.manifest.epoch >= self.base.began and state.spec.reset_optimizer
        return not is_done or any(change.needs_reset for change in changes(state.spec, spec))

    def notice(self, entry: ParametersEntry) -> str:
        """Return what users should know about a parameter set in a resumed run; empty for nothing.

        This covers a name that is not in the snapshot, changed settings with their old and new values, and a reset of
        the optimizer's state.
        """
        state, restore = self.state(entry.spec.name), entry.restore
        if state is None and self.found is not None:
            there = name_some([repr(state.spec.name) for state in self.found.manifest.parameters])
            return (
                f"{entry.spec.name!r} is not in snapshot {self.found.commit.directory}, from which the run resumes, "
                f"and starts from the values that the script gives. The snapshot has {there}: a parameter set "
                "resumes under the name that it was saved by"
            )
        if state is None or restore is None:
            return ""
        others = "; ".join(f"{change}" for change in changes(state.spec, entry.spec))
        settings = f" with other settings: {others}" if others else ""
        reset = ", and the optimizer's state is reset (reset_optimizer=True)" if restore.weights_only else ""
        return (
            f"{entry.spec.name!r} resumes from snapshot {restore.directory}{settings}{reset}" if others or reset else ""
        )

    @property
    def datasets(self) -> tuple[DatasetState, ...]:
        """Positions of data sets in the snapshot."""
        return self.found.manifest.datasets if self.found is not None else ()

    def dataset(self, spec: DatasetSpec) -> DatasetState | None:
        """Return the saved state of a data set that is opened now. Raises SettingsMismatchError, and StorageError while
        the snapshot is not known."""
        if self.unread:
            raise StorageError(
                "the storage with the snapshot that the run starts from has not been read yet: try again"
            )
        state = next((state for state in self.datasets if state.spec.name == spec.name), None)
        if state is not None and self.found is not None and (difference := state.spec.difference(spec)):
            whose = f"as snapshot {self.found.commit.directory} has it"
            raise SettingsMismatchError(f"data set {spec.name!r} {whose} has other settings: {difference}; {_REMEDY}")
        return state

    def missing(self, entry: ParametersEntry) -> dict[str, list[int]]:
        """Return the shards that are not loaded, by the server that is to load them."""
        loaded = self._loaded.get(entry.spec.name, {})
        shards = enumerate(entry.shards)
        return group((shard.primary.server_id, n) for n, shard in shards if (n, shard.term) not in loaded)

    def on_loaded(self, event: Loaded, server: str, entry: ParametersEntry) -> bool:
        """Record the shards that a server has loaded. Returns True if all shards are loaded now."""
        if entry.restore is None or event.generation != entry.generation:
            return False
        known = self._loaded.setdefault(entry.spec.name, {})
        for number, term in zip(event.shards, event.terms, strict=False):
            shard = entry.shards[number] if 0 <= number < len(entry.shards) else None
            if shard is not None and shard.primary.server_id == server and shard.term == term and not shard.lost:
                known[number, term] = None
        return not self.missing(entry)

    def go_to(self, found: CommitFound, term: int, epoch: int, now: float | None) -> None:
        """Start all parameter sets from this snapshot.

        term: highest term that a shard had.
        epoch: the epoch that shows it.
        now: None if the run has not begun.
        """
        restore = Restore(found.commit.directory, bytes.fromhex(found.commit.manifest_digest))
        generation, began = self.base.generation + (now is not None), epoch if now is None else self.base.began
        self.base = RestorePoint(restore, generation, max(term + 1, self.base.term), epoch, began)
        self.found, self.since, self.changed, self._known = found, now, True, True
        self._loaded.clear()

    def fail(self, error: PsdistError) -> None:
        """End the run with this error at every member. The first error counts."""
        self.failed = self.failed or error

    def take_change(self) -> RestorePoint | None:
        """Return the base if it changed since the previous call."""
        changed, self.changed = self.changed, False
        return self.base if changed else None

    def is_of_this_course(self, found: CommitFound) -> bool:
        """True if this snapshot belongs to the run's current history, which did not give it up."""
        restore, commit = self.base.restore, found.commit
        return restore is None or commit.directory == restore.directory or commit.epoch >= self.base.epoch

    def read(self, found: CommitFound | None) -> None:
        """Record that the storage was read. found: the base's snapshot, or None if it no longer exists."""
        if self.unread:
            self.found, self._known = found, True


def _slicing_difference(state: ParametersState, spec: ParametersSpec) -> str:
    """Return why the snapshot's slices cannot be those of a parameter set with these settings; empty if they can."""
    saved = state.spec
    if spec.slice_elements not in (0, saved.slice_elements):
        return f"slice_elements is {spec.slice_elements}, not {saved.slice_elements}"
    if isinstance(spec.consistency, BSP) and state.version_min != state.step:
        return (
            f"consistency is {spec.consistency!r}, not {saved.consistency!r}, and slices are at versions "
            f"{state.version_min} to {state.step}, while BSP has all of them at one step"
        )
    return ""


#: Pause in seconds before an unreadable storage is read again.
_READ_AGAIN_SECONDS: Final = 5.0


class Catalog:
    """Everything known about one run's storage.

    history: content of the storage; None if it was not read.
    """

    def __init__(self, resume: Resume, history: sn.History | None) -> None:
        self._resume = resume
        #: True if the storage was read.
        self.known = False
        self.commits: tuple[CommitRecord, ...] = ()
        self.newest: sn.CommitFound | None = None
        self.highest = 0
        #: Snapshots that could not be loaded, and the reason for each, by directory.
        self.bad: dict[str, str] = {}
        #: Snapshots skipped when the storage was last read, and the reason for each, by directory or path of the
        #: record. If none could be read, also those that it had before.
        self.unreadable: dict[str, str] = {}
        #: True if a snapshot was given up and the storage was not read since.
        self.is_searching = False
        #: Directory of the snapshot that is being committed; empty for none.
        self.committing = ""
        #: Directory of a snapshot that may or may not exist, as the storage did not answer; empty for none.
        self._unsure = ""
        self._is_reading = False
        self._read_at: float | None = None
        #: Why nothing is saved any more; empty while snapshots are taken.
        self.replaced = ""
        #: True if the storage may contain files that no record names.
        self._is_untidy = True
        if history is not None:
            self.on_read(history)

    @property
    def doubt(self) -> str:
        """Why the newest snapshot is not known, as text that begins with "for"; empty if it is known."""
        if not self.known:
            return "for the storage to be read"
        directory = self.committing or self._unsure
        return f"for the storage to say whether snapshot {directory} was committed" if directory else ""

    def validate(self) -> None:
        numbers = [commit.sequence for commit in self.commits]
        assert numbers == sorted(set(numbers), reverse=True) and max(numbers, default=0) <= self.highest

    @property
    def saved_steps(self) -> dict[str, int]:
        """Steps of the newest snapshot, by parameter set; empty if there is none."""
        return dict(self.newest.commit.steps) if self.newest is not None else {}

    def loss(self, names: Collection[str]) -> str:
        """Return what a snapshot of the parameter sets ``names`` would lose compared to the newest one; empty for
        nothing."""
        missing = [name for name in self.saved_steps if name not in names]
        if not missing:
            return ""
        return (
            f"{missing[0]!r}, which the snapshot before has, was not created in this run. A run that resumes from one "
            "without it starts it from scratch. Have a worker create it, even if it is no longer trained"
        )

    def begin_commit(self, directory: str) -> None:
        """Note that a commit is sent to the storage."""
        assert not self.committing, "two commits at a time would have one number"
        self.committing = directory

    def add(self, found: sn.CommitFound, *, wanted: bool = True) -> None:
        """Add the snapshot whose commit was in progress.

        wanted: True if the run may roll back to it.
        """
        commit = found.commit
        self.commits = (commit, *(other for other in self.commits if other.sequence != commit.sequence))
        self.highest = max(self.highest, commit.sequence)
        self.committing = self._unsure = ""
        if wanted:
            self.newest = found

    def fail(self, event: sn.CommitFailed) -> None:
        """End the commit in progress, which failed or may have succeeded nevertheless. In doubt the storage is read."""
        if event.unsure:
            self._unsure, self._read_at = self.committing, None
        self.committing = ""
        if event.replaced:
            self.replaced = f"{event.text}: this scheduler saves no more"

    def remove_directory(self, directory: str) -> sn.RemoveDirectory:
        """Return the removal of an abandoned attempt's files."""
        self._is_untidy = True
        return sn.RemoveDirectory(directory)

    def prune(self, policy: SavePolicy, pinned: Collection[str]) -> list[Effect]:
        """Return the deletion of snapshots that are not kept.

        pinned: directories in use.
        """
        old = surplus(self.commits, policy, pinned, self.bad.keys() | self.unreadable.keys())
        untidy, self._is_untidy = self._is_untidy, False
        return [sn.Prune(old, untidy)] if old or untidy else []

    def on_pruned(self, event: sn.Pruned) -> list[Effect]:
        self.commits = tuple(commit for commit in self.commits if commit.sequence not in event.sequences)
        if not event.error:
            return []
        return [
            LogEvent(
                f"snapshots that are no longer kept could not be deleted: {event.error}", "warning", kind="snapshot"
            )
        ]

    def on_read(self, history: sn.History | None) -> None:
        """Process the content of the storage. history: None if it could not be read."""
        self._is_reading = False
        if history is None:
            return
        skipped = dict(text.partition(": ")[::2] for text in history.skipped)
        if history.newest is None:
            listed = {commit.directory for commit in history.commits}
            gone = {c.directory: f"{c.path} is missing" for c in self.commits if c.directory not in listed}
            skipped = self.unreadable | gone | skipped
        self.known, self.is_searching = True, False
        self.commits, self.unreadable = tuple(history.commits), skipped
        self.highest = max(self.highest, history.highest)
        newest = history.newest
        given_up = newest is not None and not self.bad and not self._is_of_this_course(newest, history.commits)
        self.newest = self._resume.found if given_up else newest
        if not self.committing:  # Otherwise the storage was read before that commit.
            self._unsure = ""

    def _is_of_this_course(self, found: sn.CommitFound, commits: Iterable[CommitRecord]) -> bool:
        """Return True if the run's history contains this snapshot. It may be one before the base, which is unreadable
        then: otherwise the base would have been found first."""
        base = self._resume.base.restore
        is_before = any(base and c.directory == base.directory and found.commit.sequence < c.sequence for c in commits)
        return is_before or self._resume.is_of_this_course(found)

    def give_up(self, directory: str, why: str) -> sn.ReadHistory:
        """Give up a snapshot that cannot be loaded. Returns the request to look for the one before."""
        self.bad[directory] = why
        self.is_searching, self._read_at = True, None
        return self._read()

    def read_if_due(self, now: float) -> list[Effect]:
        """Read the storage if that was not done yet or may resolve a doubt."""
        due = not self.known or self.is_searching or (self._unsure and not self.committing)
        if not due or self._is_reading or (self._read_at is not None and now - self._read_at < _READ_AGAIN_SECONDS):
            return []
        self._read_at = now
        return [self._read()]

    def _read(self) -> sn.ReadHistory:
        self._is_reading = True
        restore = self._resume.base.restore
        return sn.ReadHistory(restore.directory if restore is not None and self._resume.unread else "", tuple(self.bad))


def surplus(
    commits: Sequence[CommitRecord], policy: SavePolicy, pinned: Collection[str], damaged: Collection[str] = ()
) -> tuple[CommitRecord, ...]:
    """Return the commits that are not kept, oldest first. Kept are the newest ``keep_last``, and the first one in each
    stretch of ``keep_every`` steps.

    commits: newest first.
    pinned: directories in use.
    damaged: unreadable directories. They do not count, and are deleted with those of the same age: until then somebody
        may want to repair them.
    """
    readable = [commit for commit in commits if commit.directory not in damaged]
    newest = readable[: policy.keep_last]
    oldest = newest[-1].sequence if len(newest) == policy.keep_last else 0
    kept = {commit.directory for commit in commits if commit.sequence >= oldest} | set(pinned)
    stretches: set[int] = set()
    for commit in reversed(readable):
        step = max(commit.steps.values(), default=0)
        if policy.keep_every and (stretch := step // policy.keep_every) not in stretches:
            stretches.add(stretch)
            kept.add(commit.directory)
    return tuple(commit for commit in reversed(commits) if commit.directory not in kept)
