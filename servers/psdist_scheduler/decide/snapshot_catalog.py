"""Catalog of the run's committed snapshots: the newest, and those that are no longer kept. Pure.

A snapshot exists if the storage has its commit record. Until the storage answers, nobody knows whether it has; after an
ambiguous answer (a time limit, a broken connection) the storage is read. ``doubt`` is set until this is known, and
decisions that depend on the newest snapshot wait (``losses``).

Invariants: ``commits`` lists the newest first, each number once, none above ``highest``. One commit is in progress at a
time, so that no two are sent under one number. The next record's number is one above the highest ever seen. A scheduler
that finds it taken saves no more. ``newest`` belongs to the current history of the run (``restore_point``).

``snapshot_io`` accesses the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from psdist.snapshots.format import CommitRecord
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.effects import Effect, LogEvent
from psdist_scheduler.decide.restore_point import Resume

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
