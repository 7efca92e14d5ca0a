"""Requests as events: reports come from members of the role that sends them, and texts are bounded."""

from __future__ import annotations

import pytest

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import STACKS_BYTES_MAX
from psdist_scheduler import conversions
from psdist_scheduler.conversions import check_report

OF_SERVERS = (
    pb.SessionRequest(join_answer=pb.SessionRequest.JoinAnswer()),
    pb.SessionRequest(replica_filled=pb.ReplicaFilled()),
    pb.SessionRequest(snapshot=pb.SnapshotReport(written=pb.SnapshotReport.Written())),
)
OF_WORKERS = (
    pb.SessionRequest(stop=pb.StopReport()),
    pb.SessionRequest(snapshot=pb.SnapshotReport(marked=pb.SnapshotReport.Marked())),
)
OF_BOTH = (
    pb.SessionRequest(heartbeat=pb.SessionRequest.Heartbeat()),
    pb.SessionRequest(snapshot=pb.SnapshotReport(failed=pb.SnapshotReport.Failed())),
    pb.SessionRequest(trace=pb.TraceReport()),
    pb.SessionRequest(),
)


@pytest.mark.parametrize(("role", "others"), [("worker", OF_SERVERS), ("server", OF_WORKERS)])
def test_a_member_does_not_report_for_the_other_role(role: str, others: tuple[pb.SessionRequest, ...]) -> None:
    for request in others:
        with pytest.raises(InvalidArgumentError, match=f"this is the session of a {role}"):
            check_report(request, role)
        check_report(request, "")  # The machine refuses an unknown member.


@pytest.mark.parametrize(("role", "own"), [("server", OF_SERVERS), ("worker", OF_WORKERS)])
def test_it_reports_everything_else(role: str, own: tuple[pb.SessionRequest, ...]) -> None:
    for request in (*own, *OF_BOTH):
        check_report(request, role)


def test_stacks_are_bounded() -> None:
    report = pb.TraceReport(number=1, stacks="x" * (STACKS_BYTES_MAX + 1))
    with pytest.raises(LimitExceededError, match="stacks"):
        conversions._trace_report(1, report)


@pytest.mark.parametrize("name", ["host", "master_address"])
def test_texts_of_an_agent_are_bounded(name: str) -> None:
    request = pb.RendezvousRequest(agent_id="a", processes=1, nodes_min=1, nodes_max=1)
    setattr(request, name, "x" * 10_000)
    with pytest.raises(LimitExceededError, match=name):
        conversions._rendezvous_event(1, request)
