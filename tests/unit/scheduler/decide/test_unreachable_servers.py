"""Servers that a worker cannot reach: whom the scheduler asks, and whom it expels by the declared rule."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.types import Replica
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver

LEASE = 10.0
REASON = "no route"


class Run:
    """Workers and servers that train one parameter set. ``cut`` and ``heal`` change the paths of a worker."""

    def __init__(self, workers: int = 3, servers: int = 2, consistency: Consistency | None = None, **settings: Any):
        self.driver = Driver(workers_min=workers, servers_min=servers, worker_lease_seconds=LEASE, **settings)
        self.servers = [self.driver.join("server") for _ in range(servers)]
        self.workers = [self.driver.join() for _ in range(workers)]
        calls = [self.driver.create(member, consistency=consistency) for member, _ in self.workers]
        self.driver.ask(ev.CommitParameters, self.workers[0][0])
        self.driver.fill()
        assert all(isinstance(self.driver.told[call][-1], ef.ParametersReady) for call in calls)
        #: By worker and server, when the path was cut.
        self._cut: dict[tuple[int, int], float] = {}
        #: Workers that do not answer questions.
        self.mute: set[int] = set()
        #: Workers that say nothing at all, and servers.
        self.frozen: set[int] = set()
        self.frozen_servers: set[int] = set()
        self._answered: dict[int, int] = {}

    def replica(self, server: int) -> Replica:
        return self.servers[server][0].replica

    def cut(self, worker: int, server: int) -> None:
        self._cut[worker, server] = self.driver.now

    def heal(self, worker: int, server: int) -> None:
        del self._cut[worker, server]

    def restart_scheduler(self) -> None:
        """All members open a session with the next scheduler."""
        self.driver = Driver(self.driver.stored, self.driver.now, worker_lease_seconds=LEASE)
        self.servers = [(member, self.driver.open(member)) for member, _ in self.servers]
        self.workers = [(member, self.driver.open(member)) for member, _ in self.workers]
        self._answered.clear()

    def pass_time(self, seconds: float) -> None:
        """Everybody sends heartbeats and answers what is asked."""
        end = self.driver.now + seconds
        while self.driver.now < end:
            self.driver.tick(0.25)
            for number, (_, session) in enumerate(self.servers):
                if number not in self.frozen_servers:
                    self.driver.beat(session)
            for number, (member, session) in enumerate(self.workers):
                if member.member_id in self.live and number not in self.frozen:
                    self._speak(number, session)

    def _speak(self, worker: int, session: int) -> None:
        driver = self.driver
        cuts = [
            ev.UnreachableServer(self.replica(s), driver.now - at, REASON)
            for (w, s), at in self._cut.items()
            if w == worker and self.servers[s][0].member_id in self.live
        ]
        driver.on(ev.Heartbeat(session, driver.map.epoch, unreachable=tuple(cuts)))
        asked = [one for one in driver.told[session] if isinstance(one, ef.CheckServer)]
        for question in asked[self._answered.get(worker, 0) :]:
            reached = question.server not in {report.server for report in cuts}
            if worker not in self.mute:
                driver.on(ev.ServerChecked(session, question.server, reached))
        self._answered[worker] = len(asked)

    @property
    def live(self) -> set[str]:
        members = self.driver.cluster.members
        return {member.member_id for member in (*members.workers, *members.servers)}

    def name(self, member: tuple[Member, int]) -> str:
        return member[0].member_id

    @property
    def gone(self) -> list[str]:
        everybody = [self.name(member) for member in (*self.workers, *self.servers)]
        return [name for name in everybody if name not in self.live]


@pytest.mark.parametrize("consistency", [BSP(), SSP(2)])
def test_a_worker_without_a_path_is_named_soon_and_expelled_after_its_lease(consistency: Consistency) -> None:
    run = Run(consistency=consistency)
    run.cut(1, 0)
    run.pass_time(5.0)
    status = run.driver.cluster
    assert any("for worker-1 to reach server-0, which it cannot; worker-0" in wait for wait in status.waits)
    (sentence,) = status.losses.unreachable.sentences("worker-1", run.driver.now)
    assert sentence.startswith("for server-0 to be reachable from here (5 s)") and REASON in sentence
    assert run.driver.notes.count(f"worker-1 cannot reach server-0: {REASON}") == 1
    run.pass_time(LEASE - 5.5)
    assert run.gone == []
    run.pass_time(2.0)
    assert run.gone == ["worker-1"]
    (lost,) = run.driver.lost
    assert "it cannot reach server-0 for 10 s" in lost.reason and "worker-0, worker-2 can" in lost.reason
    assert not any("which it cannot" in wait for wait in status.waits)


@pytest.mark.parametrize(("is_heard", "gone"), [(True, []), (False, ["worker-1"])])
def test_a_worker_that_is_heard_again_and_then_busy_is_not_expelled_for_its_old_report(
    is_heard: bool, gone: list[str]
) -> None:
    run = Run()
    run.cut(1, 0)
    run.pass_time(LEASE - 0.5)
    worker = run.workers[1][0]
    run.heal(1, 0)
    run.frozen.add(1)
    run.driver.tick(0.25)
    heard = ((*worker.identity, 0.1),) if is_heard else ()
    run.driver.on(ev.Heartbeat(run.servers[0][1], run.driver.map.epoch, heard=heard))
    run.pass_time(3.0)
    assert run.gone == gone


def test_a_path_that_is_back_in_time_expels_nobody() -> None:
    run = Run()
    for _ in range(3):
        run.cut(1, 0)
        run.pass_time(LEASE - 1.0)
        run.heal(1, 0)
        run.pass_time(1.0)
    assert run.gone == [] and run.driver.notes.count("worker-1 reaches server-0 again") == 3


def test_nobody_waits_for_a_worker_in_asp() -> None:
    run = Run(consistency=ASP())
    run.cut(1, 0)
    run.pass_time(5 * LEASE)
    assert run.gone == []
    assert any("worker-1 to reach server-0" in wait for wait in run.driver.cluster.waits)


def test_the_last_worker_is_never_expelled() -> None:
    run = Run(workers=1)
    run.cut(0, 0)
    run.pass_time(5 * LEASE)
    assert run.gone == []


def test_two_workers_with_a_broken_path_each_are_not_both_expelled() -> None:
    run = Run(workers=2)
    run.cut(0, 0)
    run.cut(1, 1)
    run.pass_time(5 * LEASE)
    assert run.gone == ["worker-1"], "one at a time, and then nobody is left who reached the other's server"


def test_a_server_that_nobody_reaches_is_no_workers_fault() -> None:
    run = Run()
    for worker in range(3):
        run.cut(worker, 0)
    run.pass_time(5 * LEASE)
    assert run.gone == [], "with the only copy on it nobody can go"


def test_a_server_that_most_workers_do_not_reach_goes_where_nothing_is_lost_with_it() -> None:
    run = Run(servers=3, replicas=2)
    run.cut(0, 0)
    run.cut(2, 0)
    run.pass_time(LEASE + 2.0)
    assert run.gone == ["server-0"]
    assert "worker-0, worker-2 cannot reach it" in run.driver.lost[0].reason


def test_copies_on_a_silent_server_do_not_count() -> None:
    """Both servers are overdue at the same tick: losing both would take the shards that only they hold."""
    run = Run(servers=3, replicas=2, lease_seconds=LEASE)
    run.frozen_servers = {1}
    for worker in range(3):
        run.cut(worker, 0)
    run.pass_time(LEASE + 0.5)
    assert run.gone == ["server-1"]
    assert not any(shard.lost for entry in run.driver.map.parameters for shard in entry.shards)


def test_without_a_witness_nobody_is_expelled() -> None:
    """Others are silent: that they do not complain is no evidence that they reach the server."""
    run = Run()
    run.mute = {0, 2}
    run.cut(1, 0)
    run.pass_time(5 * LEASE)
    assert run.gone == []


def test_old_evidence_does_not_count() -> None:
    run = Run()
    run.cut(1, 0)
    run.pass_time(LEASE - 0.5)
    run.cut(0, 0)
    run.cut(2, 0)
    run.pass_time(8.0)
    assert run.gone == [], "now nobody reaches it"


def test_a_worker_that_is_silent_itself_is_not_judged_by_an_old_report() -> None:
    run = Run(lease_seconds=2.0)
    run.cut(1, 0)
    run.pass_time(LEASE - 3.0)
    run.frozen = {1}
    run.pass_time(5.0)
    assert run.gone == []


def test_reports_of_one_who_joined_again_begin_anew() -> None:
    run = Run()
    run.cut(1, 0)
    run.pass_time(LEASE + 1.0)
    assert run.gone == ["worker-1"]
    member, session = run.driver.join(member_id="worker-1", rank=1)
    run.workers[1] = member, session
    run._answered.pop(1)
    run._cut[1, 0] = run.driver.now
    run.pass_time(3 * LEASE)
    assert run.gone == [], "it takes part in nothing yet, so nobody waits for it"


def test_questions_go_to_a_few_workers_and_not_to_those_that_doubt() -> None:
    run = Run(workers=8)
    run.cut(1, 0)
    run.driver.tick(0.25)
    run.driver.on(ev.Heartbeat(run.workers[1][1], unreachable=(ev.UnreachableServer(run.replica(0), 0.0, REASON),)))
    run.driver.tick(0.25)
    asked = [n for n, (_, session) in enumerate(run.workers) if run.driver.told[session]]
    assert len(asked) == 3 and 1 not in asked


def test_one_bad_path_of_many_workers_is_found_in_a_restarted_scheduler_too() -> None:
    """Workers report the time since which they cannot reach a server, so nothing has to be remembered."""
    run = Run()
    run.cut(1, 0)
    run.pass_time(LEASE - 2.0)
    run.restart_scheduler()
    run.pass_time(3.0)
    assert run.gone == ["worker-1"]
