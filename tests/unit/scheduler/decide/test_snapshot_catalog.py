"""The scheduler's machine and what its storage holds: numbers of records, reading, and what is kept."""

from __future__ import annotations

from psdist import errors
from psdist.snapshots.policy import SavePolicy
from psdist.types import Restore
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Member, RestorePoint
from psdist_scheduler.decide.snapshot_catalog import Catalog, Resume, surplus
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import Ready, SnapshotDriver, commit_of, history_of, ready


def test_the_number_of_a_record_is_above_all_that_were_ever_seen() -> None:
    d = ready(history=sn.History(highest=7))
    d.train(1)
    assert d.saved(d.save()).sequence == 8


def test_a_storage_that_cannot_be_read_is_read_again() -> None:
    d = ready()
    again = Ready(d.stored, d.now, history=None)
    for member in (*d.cluster.members.servers, *d.cluster.members.workers):
        again.open(member)
    call = again.save()
    assert again.state(call).waiting_for == "for the storage to be read"
    again.history = sn.History(highest=3)
    again.now += 6
    again.beat(*again.cluster.members.sessions.by_call)
    again.on(ev.Tick())
    again.go_on()
    assert again.saved(call).sequence == 4


def test_a_snapshot_before_an_unreadable_base_is_of_the_same_history() -> None:
    """A run that went back to a snapshot is started again, and neither that one nor a later one can be read."""
    d = ready(policy=SavePolicy(steps=10, keep_last=9))
    found: list[sn.CommitFound] = []
    for step in (10, 20, 30, 40):
        d.train(step)
        newest = d.cluster.snapshots.catalog.newest
        found.append(newest)
    first, base, given_up, _ = found
    commits = tuple(each.commit for each in reversed(found))
    restore = Restore(base.commit.directory, bytes.fromhex(base.commit.manifest_digest))
    resume = Resume(RestorePoint(restore, generation=1, epoch=base.commit.epoch + 50))
    assert Catalog(resume, sn.History(commits, 4, first)).newest == first
    assert Catalog(resume, sn.History(commits, 4, given_up)).newest is None
    assert Catalog(resume, sn.History(commits[:2], 4, first)).newest is None, "nobody knows the number of the base"


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_old_snapshots_are_deleted_when_a_new_one_is_there() -> None:
    d = ready(policy=SavePolicy(steps=10, keep_last=2, keep_every=30))
    for step in range(10, 110, 10):
        d.train(step)
    assert [steps["mlp"] for steps in d.steps] == [10, 30, 60, 90, 100]


def test_damaged_snapshots_do_not_count_as_kept() -> None:
    d = ready(policy=SavePolicy(steps=10, keep_last=1))
    commits = []
    for step in (10, 20, 30, 40):
        d.train(step)
        commits.insert(0, d.cluster.snapshots.catalog.commits[0])
    policy = SavePolicy(keep_last=2)

    def left(*damaged: int, policy: SavePolicy = policy) -> list[int]:
        names = [commit.directory for commit in commits if commit.sequence in damaged]
        gone = surplus(commits, policy, (), names)
        return [commit.sequence for commit in commits if commit not in gone]

    assert [commit.sequence for commit in commits] == [4, 3, 2, 1]
    assert left() == [4, 3]
    assert left(4) == [4, 3, 2] and left(4, 3) == [4, 3, 2, 1] and left(3) == [4, 3, 2]
    assert left(2) == left(1) == [4, 3], "one that is damaged goes with those that are as old"
    assert left(4, 3, 2) == left(4, 3, 2, 1) == [4, 3, 2, 1], "nothing goes while too few can be read"
    assert left(1, policy=SavePolicy(keep_last=1, keep_every=100)) == [4, 2], "the first that can be read is kept"


def test_a_snapshot_that_could_not_be_loaded_does_not_count_as_kept() -> None:
    d = ready(policy=SavePolicy(steps=10, keep_last=1))
    d.train(10)
    d.train(20)
    catalog = d.cluster.snapshots.catalog
    catalog.bad[catalog.commits[0].directory] = "it is damaged"
    assert not catalog.prune(SavePolicy(keep_last=1), ())
    d.train(30)
    assert d.steps == [{"mlp": 30}]


def test_what_could_not_be_deleted_is_tried_again() -> None:
    d = ready(policy=SavePolicy(steps=10, keep_last=1))
    d.train(10)
    d.storing = False
    d.train(20)
    (work,) = d.take_works()
    d.on(sn.Committed(work.attempt, commit_of(work.manifest, work.sequence), work.manifest))
    (prune,) = d.take_works()
    d.on(sn.Pruned((), "it does not answer"))
    assert [commit.sequence for commit in prune.commits] == [1] and any(
        "it does not answer" in note for note in d.notes
    )
    d.storing = True
    d.train(30)
    assert d.steps == [{"mlp": 30}]


# --- parameters that the snapshot before has --------------------------------------------------------------------------


def run_of_two() -> tuple[SnapshotDriver, Member]:
    """A run that resumed from a snapshot of "mlp" and "b" at step 5, and in which "b" was not created."""
    before = SnapshotDriver()
    (worker,) = before.begin()
    before.create(worker, name="b")
    before.ask(ev.CommitParameters, worker, "b")
    before.train(5)
    before.train(5, "b")
    before.go_on()
    assert before.saved(before.save()).steps == {"mlp": 5, "b": 5}
    d = SnapshotDriver(None, before.now, history=history_of(before))
    (worker,) = d.begin()
    d.go_on()
    return d, worker


def test_what_the_snapshot_before_has_is_not_lost_by_the_next() -> None:
    d, worker = run_of_two()
    assert d.state(d.save()) == sn.Saved(d.cluster.snapshots.catalog.commits[0], unchanged=True), "nothing was trained"
    d.train(6)
    at_the_end = d.number()
    d.on(sn.Save(at_the_end, "", reason="at the end"))
    d.go_on()
    error = d.state(at_the_end)
    assert isinstance(error, errors.SnapshotFailedError) and "'b', which the snapshot before has" in str(error)
    assert str(error).endswith("; training continues")
    # While the run continues it may yet be created: its state in the previous snapshot is kept.
    assert d.saved(d.save()).steps == {"mlp": 6}
    assert any("'b', which the snapshot before has" in note for note in d.notes)
    d.create(worker, name="b")
    d.go_on()
    d.versions = {"mlp": 7, "b": 5}
    d.beat_versions()
    assert d.saved(d.save()).steps == {"mlp": 7, "b": 5}


def test_at_the_end_nobody_is_told_that_training_goes_on() -> None:
    d, worker = run_of_two()
    d.train(6)
    d.on(ev.Leave(d.number(), caller(worker)))
    at_the_end = d.number()
    d.on(sn.Save(at_the_end, "", reason="at the end"))
    d.go_on()
    error = d.state(at_the_end)
    assert isinstance(error, errors.SnapshotFailedError) and "'b', which the snapshot before has" in str(error)
    assert "training continues" not in "".join([str(error), *d.notes])
