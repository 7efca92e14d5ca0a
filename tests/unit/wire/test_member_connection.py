"""What a member says in its session: heartbeats, and reports between them."""

from __future__ import annotations

import asyncio

import pytest

from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.member_connection import SessionRequests


async def test_a_slow_write_of_a_report_is_not_cut_off_by_the_next_heartbeat() -> None:
    """The stream would end without an error, and with it this member's heartbeats."""
    session = SessionRequests()
    requests = session.stream("server-0", 1, lambda: pb.SessionRequest.Heartbeat(epoch=3), 0.02)
    assert (await anext(requests)).hello.member_id == "server-0"
    assert (await anext(requests)).heartbeat.epoch == 3
    session.send(pb.SessionRequest(join_answer=pb.SessionRequest.JoinAnswer(proposal_id=7)))
    assert (await anext(requests)).join_answer.proposal_id == 7
    with pytest.raises(TimeoutError):  # And no CancelledError.
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert (await anext(requests)).HasField("heartbeat")
    await requests.aclose()
