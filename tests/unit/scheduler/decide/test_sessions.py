"""Leases and sessions: who is taken for lost, and when."""

from __future__ import annotations

from psdist_scheduler.decide.cluster_events import Heartbeat
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member
from psdist_scheduler.decide.members import RETURN_LEASES, SESSION_SECONDS, Sessions

SETTINGS = ClusterSettings("run", lease_seconds=2.0, worker_lease_seconds=30.0)
SERVER, WORKER = Member("server-0", "server", 1), Member("worker-0", "worker", 1)


def sessions(*members: Member) -> Sessions:
    """Members that registered at 100 s."""
    made = Sessions(SETTINGS, (), 100.0)
    for member in members:
        made.add(member, 100.0)
    return made


def expired(made: Sessions, now: float) -> list[str]:
    """Ids of members whose lease has expired."""
    return [member_id for member_id, known in made.liveness.items() if now > known.deadline]


def test_a_lease_is_the_members_once_it_has_a_session() -> None:
    made = sessions(SERVER, WORKER)
    assert expired(made, 102.1) == ["server-0", "worker-0"]
    made.open(7, "worker-0", 101.0)
    assert expired(made, 131.0) == ["server-0"]
    assert made.liveness["server-0"].silence(131.0) == "opened no session within 31.0 s"
    assert "worker-0" in expired(made, 131.1)
    assert made.liveness["worker-0"].silence(131.1) == "silent for 30.1 s, and --worker-timeout is 30 s"


def test_many_that_register_at_a_time_have_longer_to_open_their_sessions() -> None:
    made = sessions(*(Member(f"worker-{rank}", "worker", 1, rank) for rank in range(1001)))
    assert expired(made, 102.01) == ["worker-0"]
    assert len(expired(made, 102.0 + 500 * SESSION_SECONDS)) == 500 and len(expired(made, 152.1)) == 1001


def test_a_member_whose_session_ended_has_a_lease_to_come_back_and_three_after_a_silence() -> None:
    made = sessions(SERVER, WORKER)
    made.open(7, "server-0", 100.0)
    made.open(8, "worker-0", 100.0)
    made.detach(7, 101.5, by_member=True)
    made.detach(8, 101.5)
    assert not expired(made, 103.5) and expired(made, 103.6) == ["server-0"] and made.call_of("server-0") == 0
    assert expired(made, 101.6 + 2.0 * RETURN_LEASES) == ["server-0", "worker-0"]
    assert made.suspects(101.6) == ["server-0", "worker-0"]


def test_a_session_that_ends_while_messages_come_was_ended_by_its_member() -> None:
    made = sessions(SERVER, WORKER)
    made.open(7, "server-0", 100.0)
    made.open(8, "worker-0", 100.0)
    made.on_heartbeat(Heartbeat(7), "server-0", 101.0)
    assert made.was_steady("server-0", 101.1) and made.was_steady("worker-0", 101.1)
    made.on_heartbeat(Heartbeat(7), "server-0", 102.0)
    assert made.was_steady("server-0", 102.1) and not made.was_steady("worker-0", 102.1), "this side may have ended it"
    made.on_heartbeat(Heartbeat(8), "worker-0", 102.2)
    assert not made.was_steady("worker-0", 102.3), "what was sent before the connection broke may come late"


def test_silence_while_this_process_stood_still_does_not_count() -> None:
    made = sessions(SERVER)
    made.open(7, "server-0", 100.0)
    made.extend(101.0, 1.0)
    assert not expired(made, 103.0) and expired(made, 103.1)
    made.extend(110.0, 9.0)
    assert not expired(made, 112.0) and expired(made, 112.1)
