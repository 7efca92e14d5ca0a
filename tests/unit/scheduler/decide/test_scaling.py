"""Wanted numbers of workers, and elastic runs: the news for launchers, the awaited workers, and when no step begins."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist.errors import DuplicateMemberError, ServerLostError
from psdist.wire.limits import MEMBERS_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from tests.support.scheduler_driver import Driver


def scale(d: Driver, servers: int = 0, workers: int = 0) -> int:
    call = d.number()
    d.on(ev.Scale(call, "run", servers, workers))
    return call


def watch(d: Driver, workers_wanted: int = 0) -> int:
    call = d.number()
    d.on(ev.WatchScale(call, "run", workers_wanted))
    return call


def test_launchers_are_told_of_the_number_and_of_the_ranks_that_are_free() -> None:
    d = Driver(workers_min=2)
    for _ in range(2):
        d.join()
    d.join(rank=7, world_size=8)
    launcher = watch(d)
    assert d.state(launcher).workers_wanted == d.state(launcher).next_rank == 0
    answer = d.state(scale(d, workers=5))
    assert (answer.workers_before, answer.missing, answer.launchers, answer.drained) == (3, 2, 1, ())
    assert (d.state(launcher).workers_wanted, d.state(launcher).next_rank) == (5, 8)


def test_a_scheduler_that_was_started_again_takes_the_number_over() -> None:
    d = Driver(workers_min=2)
    assert d.state(watch(d, 4)).workers_wanted == 4
    scale(d, workers=3)
    assert d.state(watch(d, 4)).workers_wanted == 3
    assert d.state(watch(d)).workers_wanted == 3


def test_workers_that_are_not_wanted_any_more_are_not_waited_for() -> None:
    d = Driver(workers_min=3)
    d.join("server")
    workers = [d.join(rank=rank, world_size=3)[0] for rank in range(2)]
    call = d.create(workers[0])
    assert d.state(call) == ef.Waiting("for 1 of 3 workers to register")
    scale(d, workers=2)
    assert d.state(call) == ef.Waiting("for worker-1 (rank 1) to create 'mlp'")
    scale(d, workers=9)  # More are started meanwhile: those that the run needs are enough.
    assert d.state(call) == ef.Waiting("for 1 of 3 workers to register")


@pytest.mark.parametrize(("servers", "workers"), [(0, 0), (2, 2)])
def test_one_number_is_named(servers: int, workers: int) -> None:
    d = Driver()
    d.join("server")
    assert isinstance(d.errors[scale(d, servers, workers)], errors.InvalidArgumentError)
    assert d.cluster.demand.workers_wanted == d.cluster.demand.servers_wanted == 0


def test_there_is_a_limit() -> None:
    d = Driver()
    assert isinstance(d.errors[scale(d, workers=MEMBERS_MAX + 1)], errors.LimitExceededError)
    assert d.state(watch(d, MEMBERS_MAX + 1)).workers_wanted == MEMBERS_MAX


def test_ranks_that_were_given_or_are_being_started_are_not_given_again() -> None:
    d = Driver(workers_min=1)
    d.join(rank=0, world_size=1)
    agents = [d.number() for _ in range(2)]
    d.on(ev.EnterRendezvous(agents[0], "run", "agent-0", "h", 2, 1, 4))
    d.tick()
    formed = d.state(agents[0])
    assert formed.node.first_rank == 1  # Ranks 1 and 2: neither has registered yet.
    launcher = watch(d)
    scale(d, workers=3)
    assert d.state(launcher).next_rank == 3
    d.on(ev.EnterRendezvous(agents[1], "run", "agent-1", "h", 1, 1, 4))
    d.tick()
    assert d.state(agents[1]).node.first_rank == 6  # The launcher may have started three from rank 3 on.
    for _ in range(2):  # The command asks again until a launcher watches.
        scale(d, workers=4)
        assert d.state(launcher).next_rank == 7
    scale(d, workers=1)
    assert d.state(launcher).next_rank == 11


# --- elastic runs -----------------------------------------------------------------------------------------------------


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
