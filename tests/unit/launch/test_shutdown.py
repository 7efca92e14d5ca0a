"""The end of a run by itself: the order of the groups, their time limits, and the snapshot. No process is started."""

from __future__ import annotations

import signal

from psdist.launcher.events import Exited, Finish, Kill, ProcessKey, ProcessTable, Say, ServersWanted, Start
from psdist.launcher.shutdown import RunPolicy, Shutdown
from psdist.launcher.supervisor import ServerScaling, StoppingProcesses

WORKER, SERVER, SCHEDULER = ProcessKey("worker", 0), ProcessKey("server", 0), ProcessKey("scheduler", 0)
SNAPSHOT = ProcessKey("snapshot", 0)


def shutdown(table: ProcessTable, saves: bool = False) -> Shutdown:
    return Shutdown(table, RunPolicy(grace_seconds=5.0, saves=saves))


def ended(table: ProcessTable, machine: Shutdown, key: ProcessKey, now: float, returncode: int = 0) -> object:
    table.remove(key)
    return machine.on_exited(Exited(key, returncode), now)


def test_groups_are_stopped_one_after_the_other() -> None:
    table = ProcessTable((SCHEDULER, SERVER, WORKER), 0.0)
    machine = shutdown(table)
    assert not machine.is_under_way
    assert machine.start(Finish(3), 1.0) == [Kill(WORKER, signal.SIGTERM)] and machine.is_under_way
    assert ended(table, machine, WORKER, 2.0) == [Kill(SERVER, signal.SIGTERM)]
    assert ended(table, machine, SERVER, 2.0) == [Kill(SCHEDULER, signal.SIGTERM)]
    assert ended(table, machine, SCHEDULER, 2.0) == [Finish(3)]
    assert machine.on_time(1000.0) == []


def test_a_group_is_named_and_then_killed_when_its_time_is_over() -> None:
    machine = shutdown(ProcessTable((WORKER,), 0.0))
    machine.start(Finish(0), 10.0)
    assert machine.on_time(14.9) == []
    assert machine.on_time(15.0) == [Say("waiting for worker 0 to end; killed in 25 s")]
    assert machine.on_time(39.9) == []
    assert machine.on_time(40.0)[1:] == [Kill(WORKER, signal.SIGKILL)]
    assert machine.on_time(41.0) == []


def test_after_a_failure_the_others_are_interrupted_and_killed_within_a_second() -> None:
    machine = shutdown(ProcessTable((WORKER,), 0.0))
    assert machine.start(Finish(1, "worker 1 failed", ProcessKey("worker", 1)), 10.0) == [Kill(WORKER, signal.SIGTERM)]
    assert machine.on_time(10.4) == []
    assert machine.on_time(10.5) == [Kill(WORKER, signal.SIGTERM)]
    assert machine.on_time(10.9) == []
    said, kill = machine.on_time(11.0)
    assert said == Say("worker 0 did not end within 1 s of SIGTERM: killed") and kill == Kill(WORKER, signal.SIGKILL)


def test_a_snapshot_has_no_time_limit_and_its_failure_a_status() -> None:
    table = ProcessTable((SERVER, SCHEDULER), 0.0)
    table.connect(WORKER)
    machine = shutdown(table, saves=True)
    assert machine.start(Finish(0), 0.0) == [Start(SNAPSHOT, 0)]
    assert machine.on_time(3600.0) == []
    ended(table, machine, SNAPSHOT, 3600.0, returncode=1)
    ended(table, machine, SERVER, 3600.0)
    assert ended(table, machine, SCHEDULER, 3600.0) == [Finish(74)]


def test_servers_are_started_and_stopped_as_they_are_wanted() -> None:
    table = ProcessTable((SERVER,), 0.0)
    stopping = StoppingProcesses()
    servers = ServerScaling(table, stopping, grace_seconds=5.0)
    new = ProcessKey("server", 1)
    assert servers.on_wanted(ServersWanted(2), 1.0)[1:] == [Start(new, 0)] and new in table
    assert servers.on_wanted(ServersWanted(1, (0,), (0,)), 2.0)[1:] == [Kill(SERVER, signal.SIGTERM)]
    assert stopping.on_time(6.9) == [] and stopping.on_time(7.0) == [Kill(SERVER, signal.SIGKILL)]
    assert stopping.has_stopped(SERVER) and not stopping.has_stopped(new)
