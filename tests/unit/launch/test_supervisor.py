"""The supervisor's decisions: restarts, causes, the order of stopping. No process is started."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.launcher.events import (
    Connected,
    Event,
    Exited,
    Finish,
    Interrupted,
    Kill,
    ProcessKey,
    RunFailed,
    Say,
    ServersWanted,
    Start,
    TimePassed,
    WorkersWanted,
    describe,
    status_of,
)
from psdist.launcher.shutdown import STOP_TIMEOUT_SECONDS, RunPolicy
from psdist.launcher.supervisor import Supervisor
from psdist.settings.exit_codes import CERTAIN

W0, W1 = ProcessKey("worker", 0), ProcessKey("worker", 1)
S0, S1 = ProcessKey("server", 0), ProcessKey("server", 1)
S2, S3 = ProcessKey("server", 2), ProcessKey("server", 3)
SCHEDULER = ProcessKey("scheduler", 0)
SNAPSHOT = ProcessKey("snapshot", 0)
ALL = (W0, W1, S0, S1, SCHEDULER)


def supervisor(restarts: int = 0, durable: bool = False, saves: bool = False) -> Supervisor:
    policy = RunPolicy(restarts, grace_seconds=5.0, durable=durable, saves=saves)
    return Supervisor(ALL, policy)


def elastic_agent() -> Supervisor:
    return Supervisor((W0, W1), RunPolicy(restarts_max=0, elastic=True))


def test_all_workers_end_well() -> None:
    machine = supervisor()
    assert machine.on(Exited(W0, 0, True), 1.0) == []
    assert machine.on(Exited(W1, 0, True), 2.0) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
    assert machine.on(Exited(S0, 0), 2.1) == []
    assert machine.on(Exited(S1, -15), 2.2) == [Kill(SCHEDULER, signal.SIGTERM)]
    assert machine.on(Exited(SCHEDULER, 0), 2.3) == [Finish(0)]


def test_a_process_that_is_stopped_for_too_long_is_killed_and_counts_as_failed() -> None:
    machine = supervisor(restarts=1)
    for second in range(30):
        assert machine.on(TimePassed(frozenset({W0})), second) == []
    for second in (30, 31):  # It was continued, and stopped again.
        assert machine.on(TimePassed(frozenset({W1} if second == 30 else {W0, W1})), second) == []
    machine.on(TimePassed(frozenset({W0, W1})), 3600.0)  # This process was stopped itself.
    for second in range(3601, 3627):
        assert machine.on(TimePassed(frozenset({W0, W1, S0})), second) == []
    said, killed = machine.on(TimePassed(frozenset({W0, W1, S0})), 3627)
    assert said == Say("worker 1 has been stopped for 30 s, as by SIGSTOP: its process is killed")
    assert killed == Kill(W1, signal.SIGKILL)
    assert machine.on(TimePassed(frozenset({W1, S0})), 3628) == []
    assert machine.on(Exited(W1, -9, True), 3628.5)[-1] == Start(W1, 1)
    for second in range(3629, 3661):
        assert machine.on(TimePassed(frozenset({S0})), second) == []
    assert machine.on(TimePassed(frozenset({S0})), 3661)[-1] == Kill(S0, signal.SIGKILL)


def test_a_worker_is_not_restarted_into_a_group_that_a_member_has_left() -> None:
    machine = supervisor(restarts=3)
    assert machine.on(Exited(W0, 0, True, group_age=5.0), 6.0) == []
    machine.on(Exited(W1, -9, True, group_age=5.0), 7.0)
    why = " (its torch.distributed group needs worker 0, which has ended: not restarted)"
    assert finish(machine, {S0, S1, SCHEDULER}) == Finish(137, f"worker 1 failed: killed by SIGKILL{why}", W1)


def test_a_restarted_worker_ends_once_a_member_of_its_former_group_has_succeeded() -> None:
    machine = supervisor(restarts=3)
    assert Start(W1, 1) in machine.on(Exited(W1, -9, True, group_age=1.0), 2.0)
    assert machine.on(Exited(W0, 0, True, group_age=2.0), 3.0)[0] == Kill(W1, signal.SIGTERM)
    machine.on(Exited(W1, -15), 4.0)
    why = "its torch.distributed group needs worker 0, which has ended: not restarted"
    cause = f"worker 1 failed before, and cannot continue: {why}"
    assert finish(machine, {S0, S1, SCHEDULER}) == Finish(1, cause, W1)


@pytest.mark.parametrize(("own", "others"), [(None, 2.0), (1.0, 0.5), (1.0, None)])
def test_other_restarted_workers_continue(own: float | None, others: float | None) -> None:
    # Without a group, with a group that was made again together, or beside a worker without one.
    machine = supervisor(restarts=3)
    assert Start(W1, 1) in machine.on(Exited(W1, -9, True, group_age=own), 2.0)
    assert machine.on(Exited(W0, 0, True, group_age=others), 3.0) == []
    assert machine.on(Exited(W1, 0, True, group_age=0.5), 3.0) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]


def test_a_snapshot_is_taken_between_the_workers_and_the_servers_end() -> None:
    for interrupted in (False, True):
        machine = supervisor(saves=True)
        machine.on(Connected(W0), 0.5)
        if interrupted:
            machine.on(Interrupted(signal.SIGTERM), 0.9)
        machine.on(Exited(W0, 0, True), 1.0)
        assert machine.on(Exited(W1, -15, True) if interrupted else Exited(W1, 0, True), 2.0) == [Start(SNAPSHOT, 0)]
        # It has as much time as it needs.
        assert machine.on(TimePassed(), 3600.0) == []
        assert machine.on(Exited(SNAPSHOT, 0), 3600.0) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
        assert finish(machine, {S0, S1, SCHEDULER}).status == (143 if interrupted else 0)


def test_a_snapshot_that_fails_is_told_and_makes_a_good_end_a_bad_one() -> None:
    for returncode, status in ((0, 74), (3, 3)):
        machine = supervisor(saves=True)
        machine.on(Exited(W0, returncode, True), 1.0)
        assert Start(SNAPSHOT, 0) in machine.on(Exited(W1, 0, True), 2.0)
        said, *kills = machine.on(Exited(SNAPSHOT, 1), 3.0)
        lost = "progress since the last snapshot is not saved"
        assert said == Say(f"{lost}; the run ends with exit status {status}")
        assert kills == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
        assert finish(machine, {S0, S1, SCHEDULER}).status == status


def test_no_snapshot_of_what_is_lost_or_was_never_used() -> None:
    cases: list[tuple[Event, set[ProcessKey]]] = [
        (Exited(S0, -9), {W0, W1, S1, SCHEDULER}),
        (RunFailed("lost: server-1", 70), {W0, W1, S0, S1, SCHEDULER}),
        (Exited(SCHEDULER, 2), {W0, W1, S0, S1}),
    ]
    for event, alive in cases:
        machine = supervisor(saves=True)
        machine.on(Connected(W0), 0.5)
        machine.on(event, 1.0)
        finish(machine, alive)
    machine = supervisor(saves=True)
    machine.on(Exited(W0, 0), 1.0)
    assert machine.on(Exited(W1, 0), 2.0)[1:] == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]


def test_a_second_signal_leaves_the_snapshot_out_and_says_so() -> None:
    machine = supervisor(saves=True)
    machine.on(Connected(W0), 0.5)
    machine.on(Interrupted(signal.SIGINT), 1.0)
    machine.on(Exited(W0, -15, True), 1.1)
    assert machine.on(Exited(W1, -15, True), 1.2) == [Start(SNAPSHOT, 0)]
    said, *kills = machine.on(Interrupted(signal.SIGINT), 2.0)
    # The end of the snapshot is reported separately.
    assert said == Say("SIGINT again: all processes are killed")
    assert set(kills) == {Kill(key, signal.SIGKILL) for key in (S0, S1, SCHEDULER, SNAPSHOT)}
    machine = supervisor(saves=True)
    machine.on(Connected(W0), 0.5)
    machine.on(Interrupted(signal.SIGINT), 1.0)
    lost = "progress since the last snapshot is not saved"
    assert machine.on(Interrupted(signal.SIGINT), 2.0)[0] == Say(f"SIGINT again: all processes are killed; {lost}")
    assert finish(machine, {W0, W1, S0, S1, SCHEDULER}).status == 130


def test_one_stop_that_arrives_twice_is_one_stop() -> None:
    machine = supervisor(saves=True)
    machine.on(Connected(W0), 0.5)
    machine.on(Interrupted(signal.SIGTERM), 1.0)
    assert machine.on(Interrupted(signal.SIGTERM), 1.02) == [] == machine.on(Interrupted(signal.SIGINT), 1.9)
    machine.on(Exited(W0, -15, True), 1.9)
    assert machine.on(Exited(W1, -15, True), 1.9) == [Start(SNAPSHOT, 0)]
    assert Kill(SNAPSHOT, signal.SIGKILL) in machine.on(Interrupted(signal.SIGTERM), 2.0)


def test_a_first_signal_when_the_run_is_ending_leaves_the_snapshot_its_time() -> None:
    machine = supervisor(saves=True)
    machine.on(Connected(W0), 0.5)
    machine.on(Exited(W0, 0), 1.0)
    assert Start(SNAPSHOT, 0) in machine.on(Exited(W1, 0), 1.0)
    assert machine.on(Interrupted(signal.SIGTERM), 1.1) == [
        Say("SIGTERM: the run is already ending; repeat the signal to kill its processes")
    ]
    machine.on(Exited(SNAPSHOT, 0), 2.0)
    assert finish(machine, {S0, S1, SCHEDULER}).status == 0
    machine = supervisor(saves=True)
    machine.on(Connected(W0), 0.5)
    machine.on(Exited(W0, 0), 1.0)
    machine.on(Exited(W1, 0), 1.0)
    machine.on(Interrupted(signal.SIGTERM), 1.1)
    assert Kill(SNAPSHOT, signal.SIGKILL) in machine.on(Interrupted(signal.SIGTERM), 2.2)


def test_a_scheduler_that_cannot_begin_is_not_started_again() -> None:
    for status in (2, 69):
        machine = supervisor(durable=True)
        assert machine.on(Exited(SCHEDULER, status), 1.0) == [Kill(W0, signal.SIGTERM), Kill(W1, signal.SIGTERM)]
        end = finish(machine, {W0, W1, S0, S1})
        assert (end.status, end.culprit) == (status, SCHEDULER)
    machine = supervisor(durable=True)
    machine.on(Exited(SCHEDULER, -9), 1.0)
    assert machine.on(Exited(SCHEDULER, 69), 2.0)[1] == Start(SCHEDULER, 2)


@pytest.mark.parametrize("durable", [False, True])
def test_a_server_that_cannot_begin_ends_the_run_with_its_status(durable: bool) -> None:
    machine = supervisor(durable=durable)
    assert machine.on(Exited(S0, 78), 1.0) == [Kill(W0, signal.SIGTERM), Kill(W1, signal.SIGTERM)]
    end = finish(machine, {W0, W1, S1, SCHEDULER})
    assert (end.status, end.culprit, end.message) == (78, S0, "server 0 cannot begin")


def test_a_server_whose_device_was_lost_is_started_again_where_there_are_copies() -> None:
    machine = supervisor(durable=True)
    assert machine.on(Exited(S0, 71), 1.0)[1] == Start(S0, 1)
    # The device did not return; other nodes may still have the one that the run needs.
    assert machine.on(Exited(S0, 78), 2.0)[1] == Start(S0, 2)
    assert not machine.stopping


def test_a_failed_worker_is_started_again_with_its_rank() -> None:
    machine = supervisor(restarts=2)
    said, start = machine.on(Exited(W1, 3), 1.0)
    assert isinstance(said, Say) and "worker 1" in said.message and "exit code 3" in said.message
    assert start == Start(W1, 1)
    assert machine.table.attempt(W1) == 1
    assert machine.on(Exited(W1, -9), 2.0)[1] == Start(W1, 2)
    assert not machine.stopping


def test_the_first_worker_without_restarts_is_the_cause() -> None:
    machine = supervisor()
    assert machine.on(Exited(W1, -11), 1.0) == [Kill(W0, signal.SIGTERM)]
    assert machine.on(Exited(W0, 1), 1.1) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
    for key in (S0, S1):
        machine.on(Exited(key, 1), 1.2)
    (end,) = machine.on(Exited(SCHEDULER, 1), 1.3)
    assert isinstance(end, Finish)
    assert (end.status, end.culprit) == (139, W1)
    assert "SIGSEGV" in end.message


def test_a_worker_with_wrong_settings_is_not_started_again() -> None:
    machine = supervisor(restarts=3)
    assert machine.on(Exited(W1, 78), 1.0) == [Kill(W0, signal.SIGTERM)]
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (78, W1) and "not restarted" in end.message


def test_a_worker_whose_first_start_fails_before_it_connects_is_not_started_again() -> None:
    machine = supervisor(restarts=3)
    assert machine.on(Exited(W1, 1, False), 1.0) == [Kill(W0, signal.SIGTERM)]
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (1, W1)
    assert "before psdist.init()" in end.message and "not restarted" in end.message
    # One that has connected, or was killed, may succeed next time.
    for how in (Exited(W1, 1, True), Exited(W1, -9, False)):
        machine = supervisor(restarts=3)
        assert Start(W1, 1) in machine.on(how, 1.0)
        # It started once, so its present obstacle may be temporary.
        assert Start(W1, 2) in machine.on(Exited(W1, 1, False), 2.0)


def test_an_error_that_every_attempt_would_raise_is_not_tried_again() -> None:
    machine = supervisor(restarts=3)
    assert machine.on(Exited(W1, 1, True, CERTAIN), 1.0) == [Kill(W0, signal.SIGTERM)]
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (1, W1)
    assert "an error of the script itself" in end.message and "not restarted" in end.message


def test_the_same_error_twice_before_any_step_is_not_tried_a_third_time() -> None:
    for second, is_restarted in (("digest", False), ("other", True), ("", True)):
        machine = supervisor(restarts=3)
        assert Start(W1, 1) in machine.on(Exited(W1, 1, True, "digest"), 1.0)
        assert (Start(W1, 2) in machine.on(Exited(W1, 1, True, second), 2.0)) == is_restarted
    machine = supervisor(restarts=3)
    for attempt in range(3):  # Errors after a step, and signals, come without a report.
        assert Start(W1, attempt + 1) in machine.on(Exited(W1, 1 if attempt % 2 else -9, True), 1.0)


def test_in_an_elastic_run_the_others_go_on_and_one_success_is_enough() -> None:
    machine = elastic_agent()
    (said,) = machine.on(Exited(W0, 1, True), 1.0)
    assert said == Say("worker 0 failed: exit code 1; the run is elastic, so others continue: worker 1")
    assert machine.on(Exited(W1, 0, True), 2.0) == [Finish(0)]
    machine = elastic_agent()
    machine.on(Exited(W0, 0, True), 1.0)
    assert machine.on(Exited(W1, 1, True), 2.0) == [Say("worker 1 failed: exit code 1"), Finish(0)]


def test_who_came_too_late_to_join_is_left_out_and_the_others_go_on() -> None:
    machine = supervisor(restarts=3)
    assert Start(W1, 1) in machine.on(Exited(W1, -9, True), 1.0)
    (said,) = machine.on(Exited(W1, 66, True), 2.0)
    assert said == Say(
        "worker 1 failed: exit code 66 (training that it cannot join had begun: not restarted); "
        "others continue: worker 0"
    )
    machine.on(Exited(W0, 0, True), 3.0)
    assert finish(machine, {S0, S1, SCHEDULER}).status == 0
    machine = supervisor()
    machine.on(Exited(W1, 66, True), 2.0)
    machine.on(Exited(W0, 3, True), 3.0)
    assert finish(machine, {S0, S1, SCHEDULER}).status == 3


def test_an_elastic_agent_whose_workers_all_failed_has_the_status_of_the_first() -> None:
    machine = elastic_agent()
    machine.on(Exited(W1, 3, True), 1.0)
    said, end = machine.on(Exited(W0, 1, True), 2.0)
    assert said == Say("worker 0 failed: exit code 1")
    assert end == Finish(3, "worker 1 failed: exit code 3", W1)


def test_a_server_that_handed_over_what_it_held_is_started_again() -> None:
    assert supervisor().on(Exited(S1, 0), 1.0)[1] == Start(S1, 1)


def test_a_dead_server_without_a_copy_ends_the_run() -> None:
    for key, returncode in ((S1, 69), (S0, -9)):
        machine = supervisor(restarts=3)
        kills = machine.on(Exited(key, returncode), 1.0)
        assert kills == [Kill(W0, signal.SIGTERM), Kill(W1, signal.SIGTERM)]
        end = finish(machine, {W0, W1, S0, S1, SCHEDULER} - {key})
        assert (end.status, end.culprit) == (70, key)
        assert str(key) in end.message and "lost" in end.message and "--replicas 2" in end.message


def test_a_dead_server_with_copies_elsewhere_is_started_again() -> None:
    machine = supervisor(durable=True)
    said, start = machine.on(Exited(S1, -9), 1.0)
    assert isinstance(said, Say) and "server 1 died: killed by SIGKILL" in said.message
    assert start == Start(S1, 1)
    assert machine.on(Exited(S1, -9), 1.1)[1] == Start(S1, 2)
    assert machine.table.attempt(S1) == 2 and not machine.stopping


def test_without_copies_the_message_does_not_promise_that_the_run_continues() -> None:
    for copies in (False, True):
        machine = Supervisor(ALL, RunPolicy(durable=True, copies=copies))
        said, _ = machine.on(Exited(S1, -9), 1.0)
        assert isinstance(said, Say)
        assert ("the run continues" in said.message) is copies is ("if there is one" not in said.message)


def test_a_dead_scheduler_is_started_again_with_or_without_copies() -> None:
    for durable in (False, True):
        machine = supervisor(durable=durable)
        assert machine.on(Exited(SCHEDULER, 0), 1.0)[1] == Start(SCHEDULER, 1)


def test_who_dies_again_and_again_by_its_own_doing_is_given_up() -> None:
    for key in (S0, SCHEDULER):
        machine = supervisor(durable=True)
        for attempt in range(1, 5):
            assert machine.on(Exited(key, 1), attempt * 9.0)[1] == Start(key, attempt)
        assert machine.on(Exited(key, 1), 5 * 9.0) == [Kill(W0, signal.SIGTERM), Kill(W1, signal.SIGTERM)]
        end = finish(machine, {W0, W1, S0, S1, SCHEDULER} - {key})
        assert (end.status, end.culprit) == (70, key) and "5 exits in a row" in end.message


def test_a_longer_life_or_a_kill_from_outside_starts_the_count_anew() -> None:
    machine = supervisor(durable=True)
    now = 0.0
    for returncode, life in ((1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0), (1, 10.0), (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0)):
        now += life
        assert isinstance(machine.on(Exited(S0, returncode), now)[1], Start)
    for _ in range(100):
        now += 0.5
        assert isinstance(machine.on(Exited(S0, -9), now)[1], Start)


def test_missing_servers_are_started_under_numbers_that_are_never_given_again() -> None:
    machine = supervisor()
    assert [e for e in machine.on(ServersWanted(3), 1.0) if isinstance(e, Start)] == [Start(S2, 0)]
    assert machine.on(ServersWanted(3), 1.1) == []
    assert machine.on(ServersWanted(2, (2,)), 2.0) == []
    assert machine.on(ServersWanted(2, (2,), (2,)), 3.0)[1:] == [Kill(S2, signal.SIGTERM)]
    assert machine.on(ServersWanted(2, (2,), (2,)), 3.1) == []
    assert machine.on(Exited(S2, 0), 3.2) == []
    assert machine.on(ServersWanted(2), 3.3) == [] and not machine.stopping
    assert [e for e in machine.on(ServersWanted(3), 4.0) if isinstance(e, Start)] == [Start(S3, 0)]


def test_many_servers_are_started_a_few_at_a_time_and_the_newest_number_counts() -> None:
    machine = supervisor()
    assert machine.on(ServersWanted(100), 1.0)[1::2] == [Start(ProcessKey("server", n), 0) for n in range(2, 6)]
    assert machine.on(TimePassed(), 1.9) == []
    assert machine.on(ServersWanted(100, (0,)), 1.9) == []
    assert machine.on(TimePassed(), 2.0)[1::2] == [Start(ProcessKey("server", n), 0) for n in range(6, 10)]
    assert machine.on(ServersWanted(3), 2.5) == []
    assert machine.on(TimePassed(), 3.0) == [] == machine.on(TimePassed(), 60.0)
    # Ten have joined.
    assert machine.on(ServersWanted(11), 61.0)[1::2] == [Start(ProcessKey("server", 10), 0)]


def test_a_server_that_is_drained_while_as_many_are_wanted_is_replaced_at_once() -> None:
    machine = supervisor()
    assert [e for e in machine.on(ServersWanted(2, (1,)), 1.0) if isinstance(e, Start)] == [Start(S2, 0)]
    assert machine.on(ServersWanted(2, (1,), (1,)), 2.0)[1:] == [Kill(S1, signal.SIGTERM)]
    assert machine.on(Exited(S1, 0), 2.1) == []


def test_workers_are_started_under_ranks_that_none_has_had() -> None:
    machine = supervisor()
    starts = [e for e in machine.on(WorkersWanted(4, 3), 1.0) if isinstance(e, Start)]
    assert starts == [Start(ProcessKey("worker", 3), 0), Start(ProcessKey("worker", 4), 0)]
    assert machine.on(WorkersWanted(4, 5), 1.1) == []
    machine.on(Exited(ProcessKey("worker", 4), 0, True), 2.0)
    assert machine.on(WorkersWanted(4, 5), 2.1) == []  # It is done, and is not replaced.
    assert [e for e in machine.on(WorkersWanted(5, 5), 3.0) if isinstance(e, Start)] == [
        Start(ProcessKey("worker", 5), 0),
        Start(ProcessKey("worker", 6), 0),
    ]


def test_surplus_workers_are_stopped_from_the_highest_rank_on_and_are_no_failures() -> None:
    machine = supervisor(restarts=3)
    machine.on(WorkersWanted(3, 2), 1.0)
    effects = machine.on(WorkersWanted(1), 2.0)
    assert [e for e in effects if isinstance(e, Kill)] == [
        Kill(W1, signal.SIGTERM),
        Kill(ProcessKey("worker", 2), signal.SIGTERM),
    ]
    assert machine.on(Exited(W1, 143, True), 3.0) == []
    late = 2.0 + STOP_TIMEOUT_SECONDS
    assert machine.on(TimePassed(), late) == [Kill(ProcessKey("worker", 2), signal.SIGKILL)]
    assert machine.on(TimePassed(), late + 1) == []
    assert machine.on(Exited(ProcessKey("worker", 2), -9, True), late + 2) == [] and not machine.stopping
    # The last one ends the run.
    assert machine.on(Exited(W0, 0, True), late + 3) and machine.stopping


def test_when_a_run_ends_no_workers_are_started() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGINT), 1.0)
    assert machine.on(WorkersWanted(9, 2), 1.1) == []


def test_a_drained_server_that_does_not_stop_is_killed() -> None:
    machine = supervisor()
    machine.on(ServersWanted(1, (1,), (1,)), 1.0)
    assert machine.on(TimePassed(), 5.9) == []
    assert machine.on(TimePassed(), 6.0) == [Kill(S1, signal.SIGKILL)]
    assert machine.on(TimePassed(), 7.0) == []
    assert machine.on(Exited(S1, -9), 7.1) == [] and not machine.stopping


def test_nothing_is_scaled_at_the_end() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGTERM), 1.0)
    assert machine.on(ServersWanted(4, (), (1,)), 1.1) == []


def finish(machine: Supervisor, alive: set[ProcessKey]) -> Finish:
    """End all remaining processes, in the order in which they are stopped."""
    order = ("worker", "server", "scheduler")
    effects = [
        effect for key in sorted(alive, key=lambda k: order.index(k.role)) for effect in machine.on(Exited(key, -15), 2)
    ]
    (end,) = [effect for effect in effects if isinstance(effect, Finish)]
    return end


def test_who_ignores_sigterm_is_killed_after_the_grace() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGTERM), 10.0)
    machine.on(Exited(W0, 0), 10.1)
    assert machine.on(TimePassed(), 14.9) == []
    # Workers end in agreement: they get longer, and the output names the workers that are still running.
    assert machine.on(TimePassed(), 15.0) == [Say("waiting for worker 1 to end; killed in 25 s")]
    assert machine.on(TimePassed(), 39.9) == []
    said, kill = machine.on(TimePassed(), 40.0)
    assert kill == Kill(W1, signal.SIGKILL)
    assert said == Say("worker 1 did not end within 30 s of SIGTERM: killed")
    assert machine.on(TimePassed(), 50.0) == []
    machine.on(Exited(W1, -9), 50.0)
    # The next group has its own grace.
    assert machine.on(TimePassed(), 54.9) == []
    assert machine.on(TimePassed(), 55.0)[1:] == [Kill(S0, signal.SIGKILL), Kill(S1, signal.SIGKILL)]


def test_a_second_signal_kills_at_once() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGINT), 1.0)
    said, *kills = machine.on(Interrupted(signal.SIGINT), 2.0)
    # Without storage there was nothing to save.
    assert said == Say("SIGINT again: all processes are killed")
    assert kills == [Kill(key, signal.SIGKILL) for key in (W0, W1, S0, S1, SCHEDULER)]
    assert finish(machine, {W0, W1, S0, S1, SCHEDULER}).status == 130


def test_a_worker_that_never_connects_while_another_waits() -> None:
    machine = supervisor()
    machine.on(Connected(W0), 1.0)
    assert machine.on(Exited(W1, 0, False), 2.0) == [Kill(W0, signal.SIGTERM)]
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (65, W1)
    assert "worker 1" in end.message


def test_a_worker_that_connects_after_another_left_without() -> None:
    machine = supervisor()
    assert machine.on(Exited(W1, 0, False), 1.0) == []
    assert machine.on(Connected(W0), 2.0) == [Kill(W0, signal.SIGTERM)]


def test_a_script_that_never_used_psdist_is_a_warning() -> None:
    machine = supervisor()
    machine.on(Exited(W1, 0, False), 1.0)
    said = machine.on(Exited(W0, 0, False), 2.0)[0]
    assert isinstance(said, Say) and "never used psdist" in said.message
    assert finish(machine, {S0, S1, SCHEDULER}).status == 0


def test_an_attempt_that_never_connects_is_told_from_one_that_did() -> None:
    machine = supervisor(restarts=1)
    machine.on(Connected(W0), 1.0)
    machine.on(Connected(W1), 1.0)
    machine.on(Exited(W1, 1, True), 2.0)
    assert machine.waiting_to_connect() == [(W1, 1)]
    assert machine.on(Exited(W1, 0, False), 3.0) == [Kill(W0, signal.SIGTERM)]


def test_a_failure_that_is_no_exit() -> None:
    machine = supervisor()
    assert machine.on(RunFailed("no scheduler", 70, SCHEDULER), 1.0)[0] == Kill(W0, signal.SIGTERM)
    assert finish(machine, {W0, W1, S0, S1, SCHEDULER}) == Finish(70, "no scheduler", SCHEDULER)


def test_the_agent_has_workers_only() -> None:
    machine = Supervisor([ProcessKey("worker", rank) for rank in (4, 5)], RunPolicy(restarts_max=0))
    machine.on(Exited(ProcessKey("worker", 4), 0, True), 1.0)
    assert machine.on(Exited(ProcessKey("worker", 5), 0, True), 2.0) == [Finish(0)]


def test_words_and_numbers_of_an_exit() -> None:
    assert (describe(7), status_of(7)) == ("exit code 7", 7)
    assert (describe(-9), status_of(-9)) == ("killed by SIGKILL", 137)
    assert describe(-63) == "killed by signal 63"


NUMBERS = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@given(
    st.lists(
        st.one_of(
            st.builds(Exited, st.sampled_from((*ALL, SNAPSHOT)), st.sampled_from([0, 1, 78, -9]), st.booleans()),
            st.builds(Connected, st.sampled_from(ALL[:2])),
            st.just(Interrupted(signal.SIGTERM)),
            st.builds(ServersWanted, st.integers(1, 4), NUMBERS, NUMBERS),
            st.just(TimePassed()),
        ),
        max_size=30,
    ),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_history_ends_once_and_leaves_nobody(
    history: list[Event], restarts: int, durable: bool, saves: bool, elastic: bool
) -> None:
    """Check the invariants: one Finish, when nobody is alive; only the living are signalled; no process runs twice at a
    time; restarts of workers stay within the limit."""
    machine = Supervisor(ALL, RunPolicy(restarts, durable=durable, saves=saves, elastic=elastic))
    alive = dict.fromkeys(ALL, 0)
    attempts: dict[ProcessKey, int] = dict.fromkeys(ALL, 0)
    ends: list[Finish] = []
    later = [ProcessKey("server", number) for number in range(2, 64)]
    tail: list[Event] = [
        Interrupted(signal.SIGTERM),
        *(Exited(key, -15) for key in (*ALL[:2], SNAPSHOT, *ALL[2:], *later)),
    ]
    for now, event in enumerate([*history, *tail]):
        if isinstance(event, Exited | Connected):
            if event.key not in alive:
                continue
            if isinstance(event, Exited):
                del alive[event.key]
        if ends:
            continue
        for effect in machine.on(event, float(now)):
            if isinstance(effect, Start):
                assert effect.key not in alive and effect.attempt == attempts.get(effect.key, -1) + 1
                assert effect.key.role != "worker" or effect.attempt <= restarts
                alive[effect.key] = attempts[effect.key] = effect.attempt
            elif isinstance(effect, Kill):
                assert effect.key in alive
            elif isinstance(effect, Finish):
                assert not alive
                ends.append(effect)
    assert len(ends) == 1
