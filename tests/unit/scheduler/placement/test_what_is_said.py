"""Texts of the log and the status about parameter sets: nothing reads like a fault if there is none."""

from __future__ import annotations

from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver, caller


def trained() -> tuple[Driver, list[Member], list[int]]:
    """A run with ready parameters; its worker and its servers, and the sessions of the latter."""
    d = Driver(servers_min=2)
    servers = [d.join("server") for _ in range(2)]
    worker, _ = d.join()
    d.create(worker)
    d.ask(ev.CommitParameters, worker)
    return d, [worker, *(server for server, _ in servers)], [session for _, session in servers]


def leave(d: Driver, member: Member, reason: str) -> None:
    """A member goes politely."""
    d.on(ev.Leave(d.number(), caller(member), reason))


def test_after_a_restart_the_version_is_not_known_until_a_server_reports_it() -> None:
    d, members, _ = trained()
    assert "'mlp' at version 0" in d.cluster.phase
    again = Driver(d.stored, servers_min=2)
    assert "'mlp' at a version that no server has reported yet" in again.cluster.phase
    again.on(ev.Heartbeat(again.open(members[1]), again.map.epoch, versions=(("mlp", 41),)))
    assert "'mlp' at version 41" in again.cluster.phase


def test_servers_that_leave_at_the_end_of_a_run_are_no_loss() -> None:
    d, (worker, *servers), _ = trained()
    leave(d, worker, "closed")
    for server in servers:
        leave(d, server, "stopped")
    assert "server-0 left: stopped" in " ".join(d.notes)
    assert not any("alone" in note for note in d.notes), d.notes


def test_a_server_that_dies_after_the_end_of_a_run_is_noted() -> None:
    d, (worker, *_), sessions = trained()
    leave(d, worker, "closed")
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    assert any("alone; no worker is left to miss it" in note for note in d.notes), d.notes
