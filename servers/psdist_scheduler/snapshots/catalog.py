"""Which snapshots the run has: committed, the newest, and those that are not kept any more. Pure.

A snapshot exists when the storage has its commit record. Nobody knows whether it does between sending the record and
the storage's answer, nor after an answer that leaves it open; then the storage is read. ``doubt`` is true as long as
that lasts, and what depends on the newest snapshot waits (``deferred_losses``).

Invariants: ``commits`` has the newest first, each number once, none above ``highest``. One commit is under way at a
time, so that no two are sent under one number. The next record's number is one above the highest ever seen; a scheduler
that finds it taken saves no more. ``newest`` belongs to the current history of the run (``restore_point``).

Not here: the storage itself (``snapshot_io``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from psdist.snapshots.format import CommitRecord
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Effect, LogEvent
from psdist_scheduler.placement.restore_point import Resume

#: A storage that could not be read is read again after so long, in seconds.
_READ_AGAIN_SECONDS: Final = 5.0


class Catalog:
    """All that is known of one run's storage. ``history``: what it holds, None where it was not read."""

    def __init__(self, resume: Resume, history: sn.History | None) -> None:
        self._resume = resume
        #: Whether the storage was read.
        self.known = False
        self.commits: tuple[CommitRecord, ...] = ()
        self.newest: sn.CommitFound | None = None
        self.highest = 0
        #: Snapshots that could not be loaded, and why each could not, by directory.
        self.bad: dict[str, str] = {}
        #: Snapshots that were skipped when the storage was read last, and why, by directory or path of the record.
        self.unreadable: dict[str, str] = {}
        #: A snapshot was given up, and the storage was not read since.
        self.is_searching = False
        #: Directory of the snapshot whose commit is under way; empty for none.
        self.committing = ""
        #: Directory of a snapshot that exists or not, as the storage did not answer; empty for none.
        self._unsure = ""
        self._is_reading = False
        self._read_at: float | None = None
        #: Why nothing is saved any more; empty while it is.
        self.replaced = ""
        #: Whether something may lie in the storage that no record names.
        self._is_untidy = True
        if history is not None:
            self.on_read(history)

    @property
    def doubt(self) -> str:
        """What must be known before it is known which snapshot is the newest, as a sentence that begins with "for";
        empty if nothing must."""
        if not self.known:
            return "for the storage to be read"
        directory = self.committing or self._unsure
        return f"for the storage to say whether snapshot {directory} was committed" if directory else ""

    def validate(self) -> None:
        numbers = [commit.sequence for commit in self.commits]
        assert numbers == sorted(set(numbers), reverse=True) and max(numbers, default=0) <= self.highest

    @property
    def saved_steps(self) -> dict[str, int]:
        """Steps of the newest snapshot, by parameter set; empty where there is none."""
        return dict(self.newest.commit.steps) if self.newest is not None else {}

    def loss(self, names: Collection[str]) -> str:
        """What a snapshot of the parameter sets ``names`` loses that the newest one has; empty if it loses nothing."""
        missing = [name for name in self.saved_steps if name not in names]
        if not missing:
            return ""
        return (
            f"{missing[0]!r}, which the snapshot before has, was not created in this run: who goes on from a snapshot "
            "without it begins it anew. Have a worker create it, also where it is not trained any more"
        )

    def begin(self, directory: str) -> None:
        """A commit is sent to the storage."""
        assert not self.committing, "two commits at a time would have one number"
        self.committing = directory

    def add(self, found: sn.CommitFound, *, wanted: bool = True) -> None:
        """The commit under way is there. ``wanted``: the run may go back to it."""
        commit = found.commit
        self.commits = (commit, *(other for other in self.commits if other.sequence != commit.sequence))
        self.highest = max(self.highest, commit.sequence)
        self.committing = self._unsure = ""
        if wanted:
            self.newest = found

    def fail(self, event: sn.CommitFailed) -> None:
        """The commit under way has failed, or may be there all the same, so that the storage is read."""
        if event.unsure:
            self._unsure, self._read_at = self.committing, None
        self.committing = ""
        if event.replaced:
            self.replaced = f"{event.text}: this scheduler saves no more"

    def remove_directory(self, directory: str) -> sn.RemoveDirectory:
        """Removes what an attempt may have written that was given up."""
        self._is_untidy = True
        return sn.RemoveDirectory(directory)

    def prune(self, policy: SavePolicy, pinned: Collection[str]) -> list[Effect]:
        """Deletes what is not kept. ``pinned``: directories that are in use."""
        old = surplus(self.commits, policy, pinned, self.bad.keys() | self.unreadable.keys())
        untidy, self._is_untidy = self._is_untidy, False
        return [sn.Prune(old, untidy)] if old or untidy else []

    def on_pruned(self, event: sn.Pruned) -> list[Effect]:
        self.commits = tuple(commit for commit in self.commits if commit.sequence not in event.sequences)
        if not event.error:
            return []
        return [LogEvent(f"snapshots that are not kept any more could not be deleted: {event.error}", "warning")]

    def on_read(self, history: sn.History | None) -> None:
        """What the storage holds; None where it could not be read."""
        self._is_reading = False
        if history is None:
            return
        self.known, self.is_searching = True, False
        self.commits = tuple(history.commits)
        self.unreadable = dict(text.partition(": ")[::2] for text in history.skipped)
        self.highest = max(self.highest, history.highest)
        newest = history.newest
        given_up = newest is not None and not self.bad and not self._resume.is_of_this_course(newest)
        self.newest = self._resume.found if given_up else newest
        if not self.committing:  # Else it was read before.
            self._unsure = ""

    def give_up(self, directory: str, why: str) -> sn.ReadHistory:
        """A snapshot cannot be loaded: the one before is looked for."""
        self.bad[directory] = why
        self.is_searching, self._read_at = True, None
        return self._read()

    def read_if_due(self, now: float) -> list[Effect]:
        """Has the storage read where that was not done, or may resolve a doubt."""
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
    """Those of ``commits`` (the newest first) that are not kept, the oldest first.

    Kept are the newest ``keep_last``, and of every ``keep_every`` steps the first that is there.
    pinned: directories that are in use. damaged: directories that cannot be read. They do not count, and go with those
    that are as old: until then somebody may want to repair them.
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
