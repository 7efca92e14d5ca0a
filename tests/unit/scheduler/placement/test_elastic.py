"""Elastic runs: when no step begins. And members that came back while the scheduler was away: who takes whose place."""

from __future__ import annotations

import pytest

from psdist.errors import DuplicateMemberError, ServerLostError
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from tests.support.scheduler_driver import Driver


def elastic(nodes: tuple[int, int] = (2, 4), agents: int = 2, processes: int = 1) -> tuple[Driver, list[int]]:
    """A run with a server and the workers of agents that said --nnodes MIN:MAX, training; and the workers' sessions."""
    run = Driver(workers_min=1)
    run.join("server", member_id="server-0", host="s")
    for number in range(agents):
        run.on(ev.EnterRendezvous(run.number(), "run", f"agent-{number}", "h", processes, *nodes))
    run.tick()
    world = agents * processes
    workers = [run.join(rank=rank, world_size=world, host="h") for rank in range(world)]
    calls = [run.create(worker) for worker, _ in workers]
    uploading = next(i for i, call in enumerate(calls) if isinstance(run.state(call), ef.Upload))
    run.ask(ev.CommitParameters, workers[uploading][0])
    run.fill()
    assert run.map.parameters[0].ready
    return run, [session for _, session in workers]


def test_an_elastic_run_is_paused_below_its_minimum_and_says_so() -> None:
    run, sessions = elastic()
    assert run.map.paused == ""
    run.on(ev.SessionClosed(sessions[1], "killed"))
    assert "1 of 2 nodes" in run.map.paused
    assert run.cluster.phase.startswith("paused, waiting for 1 of 2 nodes")
    run.join(rank=1, world_size=2, host="h")
    assert run.map.paused == ""


def test_a_run_of_a_fixed_number_of_nodes_goes_on_with_the_rest() -> None:
    run, sessions = elastic((2, 2))
    run.on(ev.SessionClosed(sessions[1], "killed"))
    assert run.map.paused == ""


@pytest.mark.parametrize(("reason", "paused"), [("closed", False), ("stopped", True), ("failed", True)])
def test_who_is_done_is_not_waited_for_and_who_was_stopped_is(reason: str, paused: bool) -> None:
    run, _ = elastic()
    worker = run.cluster.members.workers[1]
    run.on(ev.Leave(run.number(), ev.Caller("", worker.member_id, worker.incarnation), reason))
    assert bool(run.map.paused) == paused


def test_nothing_is_paused_before_it_has_begun() -> None:
    run = Driver(workers_min=1)
    for number in range(2):
        run.on(ev.EnterRendezvous(run.number(), "run", f"agent-{number}", "h", 2, 1, 4))
    run.tick()
    run.join(rank=0, world_size=4, host="h")
    assert run.map.paused == ""


def test_a_node_is_there_while_one_of_its_workers_is() -> None:
    run, sessions = elastic(processes=2)
    run.on(ev.SessionClosed(sessions[0], "killed"))
    run.on(ev.SessionClosed(sessions[2], "killed"))
    assert run.map.paused == ""
    run.join(rank=0, world_size=4, host="h")
    run.on(ev.SessionClosed(sessions[3], "killed"))
    assert "1 of 2 nodes" in run.map.paused


def test_workers_without_an_agent_count_as_nodes() -> None:
    run, sessions = elastic((1, 4), agents=1, processes=2)
    run.join(rank=2, world_size=3, host="h")
    for session in sessions:
        run.on(ev.SessionClosed(session, "killed"))
    assert run.map.paused == ""


def test_the_minimum_survives_a_restart() -> None:
    run, sessions = elastic()
    run.on(ev.EnterRendezvous(run.number(), "run", "agent-2", "h", 5, 2, 4))
    run.tick()
    run.on(ev.SessionClosed(sessions[1], "killed"))
    assert "1 of 2 nodes" in run.map.paused
    again = Driver(run.stored, workers_min=1)
    assert again.map.paused == run.map.paused


def test_who_was_not_heard_of_since_a_restart_gives_way_to_a_process_of_its_host() -> None:
    """Killed while the scheduler was away, and started again by its launcher before the lease was over."""
    run, _ = elastic()
    again = Driver(run.stored, workers_min=1)
    worker = again.register(rank=0, world_size=2, host="h")
    server = again.register("server", member_id="server-0", host="s")
    assert (server.incarnation, worker.member_id, worker.incarnation) == (2, "worker-0", 2)
    assert isinstance(again.cluster.failed, ServerLostError), "it held shards alone"


def test_another_host_or_one_that_came_back_keeps_its_place() -> None:
    run, _ = elastic()
    again = Driver(run.stored, workers_min=1)
    for fields in ({"member_id": "server-0", "role": "server"}, {"rank": 0, "role": "worker"}):
        with pytest.raises(DuplicateMemberError):
            again.register(**fields, host="elsewhere")
    again.open(again.cluster.members.servers[0])
    with pytest.raises(DuplicateMemberError):
        again.register("server", member_id="server-0", host="s")


def test_agents_that_join_a_launcher_get_ranks_behind_its_workers() -> None:
    run = Driver(workers_min=1)
    run.join(rank=0, world_size=2, host="h")
    run.join(rank=1, world_size=2, host="h")
    calls = [run.number() for _ in range(2)]
    for number, call in enumerate(calls):
        run.on(ev.EnterRendezvous(call, "run", f"agent-{number}", "h", 2, 1, 4))
        run.tick()
    formed = [run.state(call) for call in calls]
    assert [f.node.first_rank for f in formed] == [2, 4] and [f.world_size for f in formed] == [4, 6]
