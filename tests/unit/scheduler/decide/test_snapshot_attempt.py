"""The scheduler's machine and attempts of snapshots: marks, changes and failures meanwhile, and their numbers."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist.consistency import ASP
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from tests.support.snapshot_driver import Ready, SnapshotDriver, history_of, ready, written

# --- marks ------------------------------------------------------------------------------------------------------------


def test_marked_pushes_are_cut_at_each_workers_next() -> None:
    d = ready(workers=2, consistency=ASP())
    d.train(5)
    d.answering = False
    call = d.save()
    d.answering = True
    for session, command in d.take_commands():
        assert isinstance(command, sn.Prepare) and command.steps == (("mlp", 0),)
        d.obey(session, command)
    marks = d.take_commands()
    assert all(isinstance(command, sn.Mark) for _, command in marks) and len(marks) == 2
    for number, (session, command) in enumerate(marks):
        d.on(sn.Marked(session, command.attempt, (("mlp", 5 + number),)))
    cuts = d.take_commands()
    assert {cut.next for _, cut in cuts} == {(("mlp", (("worker-0", 1, 5), ("worker-1", 1, 6))),)}
    for session, command in cuts:
        d.obey(session, command)
    d.go_on()
    state = d.cluster.snapshots.catalog.newest.manifest.state("mlp")
    assert d.saved(call).steps == {"mlp": 5} and state is not None
    assert state.next == (("worker-0", 1, 5), ("worker-1", 1, 6))


@pytest.mark.parametrize("change", ["lost", "joins", "silent"])
def test_marked_attempts_are_given_up_when_pushes_could_wait_for_ever(change: str) -> None:
    d = ready(workers=2, consistency=ASP())
    d.writing = False
    call = d.save()
    number = d.attempt.number
    session = d.cluster.members.sessions.call_of("worker-1")
    if change == "lost":
        d.on(ev.SessionClosed(session, "its session broke"))
    elif change == "joins":
        worker, _ = d.join()
        d.create(worker, consistency=ASP())
    else:
        sessions = [d.cluster.members.sessions.call_of(m) for m in ("worker-0", "worker-1", "server-0", "server-1")]
        held = ev.AttemptProgress(number, 0, 100, "for slice 0 to reach the cut")
        for _ in range(12):
            d.beat(*sessions)
            d.on(ev.Heartbeat(sessions[2], d.map.epoch, progress=held))
            d.tick()
    assert d.attempt.number > number
    assert any(isinstance(c, sn.End) and c.attempt == number and not c.committed for _, c in d.commands)
    assert any(isinstance(work, sn.RemoveDirectory) for work in d.works) or d.works == []
    d.writing = True
    d.go_on()
    assert d.saved(call) and d.cluster.snapshots.failures.count == 0


def test_a_client_that_never_answers_costs_the_others_no_more_than_some_leases() -> None:
    d = ready(workers=2, consistency=ASP())
    d.answering = False
    call = d.save()
    attempts = set()
    for _ in range(80):
        attempts.add(d.cluster.snapshots.attempt and d.cluster.snapshots.attempt.number)
        d.beat(*(d.cluster.members.sessions.call_of(m) for m in ("worker-0", "worker-1", "server-0", "server-1")))
        for session, command in d.take_commands():
            if not isinstance(command, sn.Mark) or d.cluster.members.sessions.by_call[session] == "worker-0":
                d.obey(session, command)
        d.tick()
    assert len(attempts) <= 4 and "waited too long for worker-1 to mark its pushes" in str(d.errors[call])


# --- what changes meanwhile -------------------------------------------------------------------------------------------


def test_another_primary_begins_it_anew() -> None:
    d = ready(servers=3, replicas=2, servers_min=3)
    d.fill()
    d.go_on()
    d.train(5)
    d.writing = False
    call = d.save()
    before = d.attempt.directory
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of("server-0"), "its session broke"))
    d.writing = True
    d.go_on()
    assert d.saved(call).directory != before and d.saved(call).steps == {"mlp": 5}


def test_what_a_primary_of_an_earlier_term_has_written_does_not_count() -> None:
    d = ready()
    d.train(5)
    d.writing = False
    d.save()
    number = d.attempt.number
    entry = d.entry()
    owner = d.cluster.members.sessions.call_of(entry.primaries[0])
    other = next(d.cluster.members.sessions.call_of(s) for s in entry.primaries if s != entry.primaries[0])
    good = written(owner, number, entry, 0, 5)
    for bad in (
        written(other, number, entry, 0, 5),
        sn.Written(owner, number, "mlp", 0, good.term + 1, good.file, good.state_names),
        sn.Written(owner, number, "mlp", 99, good.term, good.file, good.state_names),
        sn.Written(owner, number - 1, "mlp", 0, good.term, good.file, good.state_names),
        sn.Written(owner, number, "unknown", 0, good.term, good.file, good.state_names),
    ):
        d.on(bad)
        assert len(d.attempt.written) == 0
    d.on(good)
    assert len(d.attempt.written) == 1


def test_slices_that_are_not_at_the_cut_fail_it() -> None:
    """A safeguard: nothing is committed whose slices have different steps, no matter what servers report."""
    d = ready()
    d.train(5)
    d.writing = False
    call = d.save()
    number, entry = d.attempt.number, d.entry()
    for shard, primary in enumerate(entry.primaries):
        d.on(written(d.cluster.members.sessions.call_of(primary), number, entry, shard, 5 + (shard == 1)))
    assert "versions 5 to 6" in str(d.errors[call]) and d.steps == []


def test_a_new_session_of_a_server_is_asked_again() -> None:
    d = ready()
    d.train(5)
    d.answering = False
    call = d.save()
    d.commands.clear()
    for server in list(d.cluster.members.servers):
        d.open(server)
    assert [type(command) for _, command in d.commands] == [sn.Prepare, sn.Prepare]
    d.answering = True
    d.go_on()
    assert d.saved(call)


def test_members_that_come_back_to_a_new_scheduler_hear_that_nothing_is_under_way() -> None:
    d = ready()
    again = Ready(d.stored, d.now, history=history_of(d))
    again.open(d.cluster.members.servers[0])
    ((_, command),) = again.commands
    again.commands.clear()
    assert isinstance(command, sn.End) and command.attempt >> 20 == again.cluster.epoch
    for server in d.cluster.members.servers[1:]:
        again.open(server)
    again.answering = False
    again.save()
    assert again.attempt.number > command.attempt


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_and_the_next_one_works() -> None:
    d = ready()
    d.train(5)
    d.writing = False
    call = d.save()
    number = d.attempt.number
    d.on(sn.PartFailed(d.cluster.members.sessions.call_of("server-0"), number, "no space is left"))
    assert isinstance(d.errors[call], errors.SnapshotFailedError) and "server-0: no space is left" in str(
        d.errors[call]
    )
    assert d.cluster.snapshots.failures.count == 1 and any("no space is left" in note for note in d.notes)
    assert any(isinstance(c, sn.End) and not c.committed for _, c in d.commands)
    assert [type(work) for work in d.works] == [sn.RemoveDirectory]
    d.writing = True
    assert d.saved(d.save()).steps == {"mlp": 5}


def test_an_interval_goes_on_after_a_failure_at_the_next_step() -> None:
    d = ready(policy=SavePolicy(steps=10))
    d.writing = False
    d.train(10)
    number = d.attempt.number
    d.on(sn.PartFailed(d.cluster.members.sessions.call_of("server-0"), number, "no space is left"))
    d.writing = True
    d.go_on()
    d.train(20)
    assert d.steps == [{"mlp": 20}]


def test_a_commit_that_fails_is_told() -> None:
    d = ready()
    d.train(5)
    d.storing = False
    call = d.save()
    (work,) = [work for work in d.works if isinstance(work, sn.WriteCommit)]
    d.works.clear()
    d.on(sn.CommitFailed(work.attempt, "the manifest cannot be written: it is gone"))
    assert "the manifest cannot be written" in str(d.errors[call]) and not d.works
    d.storing = True
    assert d.saved(d.save()).sequence == work.sequence


def test_nothing_stops_what_is_being_committed() -> None:
    """All its files are durable, and the record may exist already: neither a server's loss nor its word matters."""
    d = ready(servers=3, replicas=2, servers_min=3)
    d.fill()
    d.go_on()
    d.train(5)
    d.storing = False
    call = d.save()
    number = d.attempt.number
    d.on(sn.PartFailed(d.cluster.members.sessions.call_of("server-0"), number, "no space"))
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of("server-0"), "its session broke"))
    d.save()
    assert d.attempt.number == number and [type(work) for work in d.works] == [sn.WriteCommit]
    d.storing = True
    d.go_on()
    assert d.saved(call).steps == {"mlp": 5}


def test_a_scheduler_that_was_replaced_saves_no_more() -> None:
    d = ready()
    d.train(5)
    d.storing = False
    call = d.save()
    (work,) = [work for work in d.works if isinstance(work, sn.WriteCommit)]
    d.works.clear()
    d.on(sn.CommitFailed(work.attempt, "commits/1 is another's", replaced=True))
    assert "another's" in str(d.errors[call])
    d.storing = True
    d.train(6)
    again = d.save()
    assert "saves no more" in str(d.errors[again]) and not d.works and d.steps == []


# --- attempts that nobody answers -------------------------------------------------------------------------------------


def test_silence_of_the_storage_ends_an_attempt() -> None:
    d = ready()
    d.train(5)
    d.writing = False
    call = d.save()
    sessions = [d.cluster.members.sessions.call_of(m) for m in ("worker-0", "server-0", "server-1")]
    for _ in range(300):
        d.now += 0.5
        d.beat(*sessions)
        d.on(ev.Tick())
    assert "nothing was heard for" in str(d.errors[call])


def test_silence_of_servers_ends_an_attempt_that_nobody_waits_for_too() -> None:
    d = ready(policy=SavePolicy(steps=10))
    d.answering = False
    d.train(10)
    for _ in range(300):
        d.now += 0.5
        d.beat(*d.cluster.members.sessions.by_call)
        d.on(ev.Tick())
    failures = d.cluster.snapshots.failures
    assert failures.count == 1 and "to agree on a cut" in failures.text


def test_attempts_of_a_scheduler_that_is_started_again_have_higher_numbers_than_those_before() -> None:
    """Servers ignore a number that is not above all that they heard: the attempt would never be agreed on.

    The first one starts before any member can be asked."""
    d = ready(policy=SavePolicy(steps=10))
    for _ in range(3):
        d.save()
    before = d.attempt.number
    again = SnapshotDriver(d.stored, d.now, history=history_of(d), policy=SavePolicy(steps=10))
    attempt = again.cluster.snapshots.attempt
    assert attempt is not None and attempt.number > before
