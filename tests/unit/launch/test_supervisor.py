"""The supervisor's decisions: restarts, causes, the order of stopping. No process is started."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

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
from psdist.settings.exit_codes import CERTAIN, DEBUGGER_LEFT

W0, W1 = ProcessKey("worker", 0), ProcessKey("worker", 1)
S0, S1 = ProcessKey("server", 0), ProcessKey("server", 1)
S2, S3 = ProcessKey("server", 2), ProcessKey("server", 3)
SCHEDULER = ProcessKey("scheduler", 0)
SNAPSHOT = ProcessKey("snapshot", 0)
ALL = (W0, W1, S0, S1, SCHEDULER)
WORKERS, SERVERS = (W0, W1), (S0, S1)


def supervisor(restarts: int = 0, durable: bool = False, saves: bool = False) -> Supervisor:
    policy = RunPolicy(restarts, grace_seconds=5.0, durable=durable, saves=saves)
    return Supervisor(ALL, policy)


def elastic_agent() -> Supervisor:
    return Supervisor(WORKERS, RunPolicy(restarts_max=0, elastic=True))


def terminate(*keys: ProcessKey) -> list[Kill]:
    return [Kill(key, signal.SIGTERM) for key in keys]


def starts(effects: Sequence[object]) -> list[Start]:
    return [effect for effect in effects if isinstance(effect, Start)]


def connected(**policy: Any) -> Supervisor:
    """Return the supervisor of a run whose first worker has registered."""
    machine = supervisor(**policy)
    machine.on(Connected(W0), 0.5)
    return machine


def refused(machine: Supervisor, ended: Exited, status: int, *words: str) -> None:
    """Check that an exit ends the run with this status, and that the message has these words."""
    others = terminate(*(key for key in WORKERS if key != ended.key))
    # A worker that has not connected may be printing the same error.
    assert machine.on(ended, 1.0) == ([] if ended.key in WORKERS else others)
    assert machine.on(TimePassed(), 1.5) == (others if ended.key in WORKERS else [])
    end = finish(machine, {*ALL} - {ended.key})
    assert (end.status, end.culprit) == (status, ended.key)
    assert all(word in end.message for word in words), end.message


def test_all_workers_end_well() -> None:
    machine = supervisor()
    assert machine.on(Exited(W0, 0, True), 1.0) == []
    assert machine.on(Exited(W1, 0, True), 2.0) == terminate(*SERVERS)
    assert machine.on(Exited(S0, 0), 2.1) == []
    assert machine.on(Exited(S1, -15), 2.2) == terminate(SCHEDULER)
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
    assert machine.on(Exited(W1, 0, True, group_age=0.5), 3.0) == terminate(*SERVERS)


def test_a_snapshot_is_taken_between_the_workers_and_the_servers_end() -> None:
    for interrupted in (False, True):
        machine = connected(saves=True)
        if interrupted:
            machine.on(Interrupted(signal.SIGTERM), 0.9)
        machine.on(Exited(W0, 0, True), 1.0)
        assert machine.on(Exited(W1, -15, True) if interrupted else Exited(W1, 0, True), 2.0) == [Start(SNAPSHOT, 0)]
        # It has as much time as it needs.
        assert machine.on(TimePassed(), 3600.0) == []
        assert machine.on(Exited(SNAPSHOT, 0), 3600.0) == terminate(*SERVERS)
        assert finish(machine, {S0, S1, SCHEDULER}).status == (143 if interrupted else 0)


def test_a_snapshot_that_fails_is_told_and_makes_a_good_end_a_bad_one() -> None:
    for returncode, status in ((0, 74), (3, 3)):
        machine = supervisor(saves=True)
        machine.on(Exited(W0, returncode, True), 1.0)
        assert Start(SNAPSHOT, 0) in machine.on(Exited(W1, 0, True), 2.0)
        said, *kills = machine.on(Exited(SNAPSHOT, 1), 3.0)
        lost = "progress since the last snapshot is not saved"
        assert said == Say(f"{lost}; the run ends with exit status {status}")
        assert kills == terminate(*SERVERS)
        assert finish(machine, {S0, S1, SCHEDULER}).status == status


def test_no_snapshot_of_what_is_lost_or_was_never_used() -> None:
    cases: list[tuple[Event, set[ProcessKey]]] = [
        (Exited(S0, -9), {W0, W1, S1, SCHEDULER}),
        (RunFailed("lost: server-1", 70), {*ALL}),
        (Exited(SCHEDULER, 2), {W0, W1, S0, S1}),
    ]
    for event, alive in cases:
        machine = connected(saves=True)
        machine.on(event, 1.0)
        finish(machine, alive)
    machine = supervisor(saves=True)
    machine.on(Exited(W0, 0), 1.0)
    assert machine.on(Exited(W1, 0), 2.0)[1:] == terminate(*SERVERS)


@pytest.mark.parametrize(("saves", "lost"), [(True, "; progress since the last snapshot is not saved"), (False, "")])
def test_a_second_signal_kills_at_once_and_says_what_is_lost(saves: bool, lost: str) -> None:
    machine = connected(saves=saves)
    machine.on(Interrupted(signal.SIGINT), 1.0)
    said, *kills = machine.on(Interrupted(signal.SIGINT), 2.0)
    assert said == Say(f"SIGINT again: all processes are killed{lost}")
    assert kills == [Kill(key, signal.SIGKILL) for key in ALL]
    assert finish(machine, {*ALL}).status == 130


def test_a_second_signal_kills_the_snapshot_too() -> None:
    machine = connected(saves=True)
    machine.on(Interrupted(signal.SIGINT), 1.0)
    machine.on(Exited(W0, -15, True), 1.1)
    assert machine.on(Exited(W1, -15, True), 1.2) == [Start(SNAPSHOT, 0)]
    said, *kills = machine.on(Interrupted(signal.SIGINT), 2.0)
    # The end of the snapshot is reported separately.
    assert said == Say("SIGINT again: all processes are killed")
    assert set(kills) == {Kill(key, signal.SIGKILL) for key in (S0, S1, SCHEDULER, SNAPSHOT)}


def test_one_stop_that_arrives_twice_is_one_stop() -> None:
    machine = connected(saves=True)
    machine.on(Interrupted(signal.SIGTERM), 1.0)
    assert machine.on(Interrupted(signal.SIGTERM), 1.02) == [] == machine.on(Interrupted(signal.SIGINT), 1.9)
    assert machine.on(Interrupted(signal.SIGTERM), 2.0)[1:] == [Kill(key, signal.SIGKILL) for key in ALL]


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_first_signal_when_the_run_is_ending_leaves_the_snapshot_its_time(is_repeated: bool) -> None:
    machine = connected(saves=True)
    machine.on(Exited(W0, 0), 1.0)
    assert Start(SNAPSHOT, 0) in machine.on(Exited(W1, 0), 1.0)
    assert machine.on(Interrupted(signal.SIGTERM), 1.1) == [
        Say("SIGTERM: the run is already ending; repeat the signal to kill its processes")
    ]
    if is_repeated:
        assert Kill(SNAPSHOT, signal.SIGKILL) in machine.on(Interrupted(signal.SIGTERM), 2.2)
    else:
        machine.on(Exited(SNAPSHOT, 0), 2.0)
        assert finish(machine, {S0, S1, SCHEDULER}).status == 0


@pytest.mark.parametrize("durable", [False, True])
def test_a_service_that_cannot_begin_ends_the_run_with_its_status(durable: bool) -> None:
    for key, status, words in [
        (SCHEDULER, 2, ""),
        (SCHEDULER, 69, ""),
        (S0, 78, "server 0 cannot begin"),
        (S0, 2, "server 0"),
    ]:
        refused(supervisor(durable=durable), Exited(key, status), status, words)
    machine = supervisor(durable=True)
    machine.on(Exited(SCHEDULER, -9), 1.0)
    assert machine.on(Exited(SCHEDULER, 69), 2.0)[1] == Start(SCHEDULER, 2)  # It had begun before.


@pytest.mark.parametrize("copies", [False, True])
def test_a_dead_server_with_copies_elsewhere_is_started_again(copies: bool) -> None:
    machine = Supervisor(ALL, RunPolicy(durable=True, copies=copies))
    said, start = machine.on(Exited(S1, -9), 1.0)
    assert isinstance(said, Say) and "server 1 died: killed by SIGKILL" in said.message
    assert ("the run continues" in said.message) is copies is ("if there is one" not in said.message)
    assert start == Start(S1, 1)
    # Its device was lost, and did not return; other nodes may still have the one that the run needs.
    assert machine.on(Exited(S1, 71), 1.1)[1] == Start(S1, 2)
    assert machine.on(Exited(S1, 78), 1.2)[1] == Start(S1, 3)
    assert machine.table.attempt(S1) == 3 and not machine.stopping


def test_a_failed_worker_is_started_again_with_its_rank() -> None:
    machine = supervisor(restarts=2)
    machine.on(Connected(W1), 0.5)
    said, start = machine.on(Exited(W1, 3), 1.0)
    assert isinstance(said, Say) and "worker 1" in said.message and "exit code 3" in said.message
    assert start == Start(W1, 1)
    assert machine.table.attempt(W1) == 1
    assert machine.on(Exited(W1, -9), 2.0)[1] == Start(W1, 2)
    assert not machine.stopping


def test_the_first_worker_without_restarts_is_the_cause() -> None:
    machine = connected()
    assert machine.on(Exited(W1, -11), 1.0) == terminate(W0)
    # The others are interrupted again, and killed within a second.
    assert machine.on(TimePassed(), 1.4) == []
    assert machine.on(TimePassed(), 1.5) == terminate(W0)
    assert machine.on(TimePassed(), 1.9) == []
    said, kill = machine.on(TimePassed(), 2.0)
    assert said == Say("worker 0 did not end within 1 s of SIGTERM: killed") and kill == Kill(W0, signal.SIGKILL)
    assert machine.on(Exited(W0, 1), 2.1) == terminate(*SERVERS)
    end = finish(machine, {S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (139, W1) and "SIGSEGV" in end.message


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (Exited(W1, 78), 78, ["not restarted"]),
        (Exited(W1, 1, False), 1, ["before psdist.init()", "not restarted"]),
        # argparse, a script without the bit for execution, one whose interpreter is missing, one that knows its status.
        *((Exited(W1, status, False), status, ["exit code", "not restarted"]) for status in (2, 126, 127, 3)),
        (Exited(W1, -11, False), 139, ["SIGSEGV", "not restarted"]),
        (Exited(W1, 1, True, CERTAIN), 1, ["an error of the script itself", "not restarted"]),
        (Exited(S1, 69), 70, ["server 1", "lost", "--replicas 2"]),
        (Exited(S0, -9), 70, ["server 0", "lost", "--replicas 2"]),
    ],
)
def test_what_another_attempt_would_not_change_ends_the_run(ended: Exited, status: int, words: list[str]) -> None:
    refused(supervisor(restarts=3), ended, status, *words)


def test_a_worker_that_connected_or_was_killed_may_succeed_next_time() -> None:
    # A shell reports the death of its child as 137, and 69 says that no scheduler has answered yet.
    for how in (Exited(W1, 1, True), Exited(W1, 2, True), *(Exited(W1, status, False) for status in (-9, 137, 69))):
        machine = supervisor(restarts=3)
        assert Start(W1, 1) in machine.on(how, 1.0)
        # It started once, so its present obstacle may be temporary.
        assert Start(W1, 2) in machine.on(Exited(W1, 1, False), 2.0)


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


def test_a_dead_scheduler_and_a_server_that_handed_over_its_shards_are_started_again() -> None:
    for key in (SCHEDULER, S1):
        for durable in (False, True):
            assert supervisor(durable=durable).on(Exited(key, 0), 1.0)[1] == Start(key, 1)


def test_who_dies_again_and_again_by_its_own_doing_is_given_up() -> None:
    for key in (S0, SCHEDULER):
        machine = supervisor(durable=True)
        for attempt in range(1, 5):
            assert machine.on(Exited(key, 1), attempt * 9.0)[1] == Start(key, attempt)
        assert machine.on(Exited(key, 1), 5 * 9.0) == terminate(*WORKERS)
        end = finish(machine, {*ALL} - {key})
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
    assert starts(machine.on(ServersWanted(3), 1.0)) == [Start(S2, 0)]
    assert machine.on(ServersWanted(3), 1.1) == []
    assert machine.on(ServersWanted(2, (2,)), 2.0) == []
    assert machine.on(ServersWanted(2, (2,), (2,)), 3.0)[1:] == terminate(S2)
    assert machine.on(ServersWanted(2, (2,), (2,)), 3.1) == []
    assert machine.on(Exited(S2, 0), 3.2) == []
    assert machine.on(ServersWanted(2), 3.3) == [] and not machine.stopping
    assert starts(machine.on(ServersWanted(3), 4.0)) == [Start(S3, 0)]


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
    assert starts(machine.on(ServersWanted(2, (1,)), 1.0)) == [Start(S2, 0)]
    assert machine.on(ServersWanted(2, (1,), (1,)), 2.0)[1:] == terminate(S1)
    # It does not stop, and is killed.
    assert machine.on(TimePassed(), 6.9) == []
    assert machine.on(TimePassed(), 7.0) == [Kill(S1, signal.SIGKILL)]
    assert machine.on(TimePassed(), 8.0) == []
    assert machine.on(Exited(S1, -9), 8.1) == [] and not machine.stopping


def test_workers_are_started_under_ranks_that_none_has_had() -> None:
    machine, ranks = supervisor(), [ProcessKey("worker", rank) for rank in range(7)]
    assert starts(machine.on(WorkersWanted(4, 3), 1.0)) == [Start(ranks[3], 0), Start(ranks[4], 0)]
    assert machine.on(WorkersWanted(4, 5), 1.1) == []
    machine.on(Exited(ranks[4], 0, True), 2.0)
    assert machine.on(WorkersWanted(4, 5), 2.1) == []  # It is done, and is not replaced.
    assert starts(machine.on(WorkersWanted(5, 5), 3.0)) == [Start(ranks[5], 0), Start(ranks[6], 0)]


def test_surplus_workers_are_stopped_from_the_highest_rank_on_and_are_no_failures() -> None:
    machine, last = supervisor(restarts=3), ProcessKey("worker", 2)
    machine.on(WorkersWanted(3, 2), 1.0)
    effects = machine.on(WorkersWanted(1), 2.0)
    assert [effect for effect in effects if isinstance(effect, Kill)] == terminate(W1, last)
    assert machine.on(Exited(W1, 143, True), 3.0) == []
    late = 2.0 + STOP_TIMEOUT_SECONDS
    assert machine.on(TimePassed(), late) == [Kill(last, signal.SIGKILL)]
    assert machine.on(TimePassed(), late + 1) == []
    assert machine.on(Exited(last, -9, True), late + 2) == [] and not machine.stopping
    # The last one ends the run.
    assert machine.on(Exited(W0, 0, True), late + 3) and machine.stopping


def test_nothing_is_scaled_at_the_end() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGTERM), 1.0)
    assert machine.on(WorkersWanted(9, 2), 1.1) == [] == machine.on(ServersWanted(4, (), (1,)), 1.1)


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


def test_a_worker_that_never_connects_while_another_waits() -> None:
    machine = supervisor()
    machine.on(Connected(W0), 1.0)
    assert machine.on(Exited(W1, 0, False), 2.0) == terminate(W0)
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (65, W1)
    assert "worker 1" in end.message


def test_a_worker_that_connects_after_another_left_without() -> None:
    machine = supervisor()
    assert machine.on(Exited(W1, 0, False), 1.0) == []
    assert machine.on(Connected(W0), 2.0) == terminate(W0)


def test_a_script_that_never_used_psdist_is_a_warning() -> None:
    machine = supervisor()
    machine.on(Exited(W1, 0, False), 1.0)
    said = machine.on(Exited(W0, 0, False), 2.0)[0]
    assert isinstance(said, Say) and "never used psdist" in said.message
    assert finish(machine, {S0, S1, SCHEDULER}).status == 0


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {}, ["warning: no worker pushed, so nothing was trained"]),
        ({"w": 200}, {"w": 400}, ["worker 0 ended after step 200 of 'w', and worker 1 after step 400", "range(n)"]),
        ({"w": 7, "mean": 3}, {"w": 8, "mean": 3}, []),  # The last batch of some.
        ({"w": 7}, {}, ["warning: worker 1 never pushed, and the others trained alone"]),
        ({"w": 7}, {"v": 9}, []),  # Sets of parts of the workers.
        ({}, None, []),  # It trained by a group, or ended in its own way.
    ],
)
def test_strange_steps_are_said_at_the_end(
    first: dict[str, int], second: dict[str, int] | None, words: list[str]
) -> None:
    machine = connected()
    machine.on(Exited(W0, 0, True, steps=first), 1.0)
    said = [one.message for one in machine.on(Exited(W1, 0, True, steps=second), 2.0) if isinstance(one, Say)]
    assert len(said) == bool(words) and all(word in said[0] for word in words), said
    assert finish(machine, {S0, S1, SCHEDULER}) == Finish(0)


def test_an_attempt_that_never_connects_is_told_from_one_that_did() -> None:
    machine = supervisor(restarts=1)
    machine.on(Connected(W0), 1.0)
    machine.on(Connected(W1), 1.0)
    machine.on(Exited(W1, 1, True), 2.0)
    assert machine.waiting_to_connect() == [(W1, 1)]
    assert machine.on(Exited(W1, 0, False), 3.0) == terminate(W0)


def test_a_failure_that_is_no_exit() -> None:
    machine = supervisor()
    assert machine.on(RunFailed("no scheduler", 70, SCHEDULER), 1.0) == terminate(*WORKERS)
    assert finish(machine, {*ALL}) == Finish(70, "no scheduler", SCHEDULER)


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


def test_a_debugger_that_was_left_ends_the_run_only_in_the_worker_with_the_terminal() -> None:
    left = Exited(W1, 1, True, DEBUGGER_LEFT)
    debugged = Supervisor(WORKERS, RunPolicy(debugged=W1))
    assert not starts(debugged.on(left, 1.0)) and debugged.stopping
    [finish] = [e for e in debugged.on(Exited(W0, -signal.SIGTERM), 1.1) if isinstance(e, Finish)]
    assert (finish.status, finish.message) == (1, "the debugger of worker 1 was left: the run ends")
    other = Supervisor(WORKERS, RunPolicy(debugged=W0))
    assert not starts(other.on(left, 1.0))
    [finish] = [e for e in other.on(Exited(W0, -signal.SIGTERM), 1.1) if isinstance(e, Finish)]
    assert "psdist run --debug-worker 1" in finish.message


def test_ctrl_c_in_the_worker_with_the_terminal_is_one_of_the_launcher() -> None:
    machine = Supervisor(WORKERS, RunPolicy(debugged=W0))
    effects = machine.on(Exited(W0, -signal.SIGINT, True), 1.0)
    assert not starts(effects) and terminate(W1)[0] in effects
    [finish] = [e for e in machine.on(Exited(W1, -signal.SIGTERM), 1.1) if isinstance(e, Finish)]
    assert finish.status == 130
    assert starts(Supervisor(WORKERS, RunPolicy(debugged=W1)).on(Exited(W0, -signal.SIGINT, True), 1.0))
