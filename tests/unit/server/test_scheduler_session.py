"""What a server says in its session: heartbeats, and answers between them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from psdist.v1 import scheduler_pb2 as pb
from psdist_server.scheduler_session import ServerSession
from psdist_server.server import ParameterServer, ServerRegistration


async def test_a_slow_write_of_an_answer_is_not_cut_off_by_the_next_heartbeat() -> None:
    """The stream would end without an error, and with it this server's heartbeats."""
    link = ServerSession("127.0.0.1:1", "", "127.0.0.1:2", "server-0", "run")
    link.registration = replace(link.registration, heartbeat_seconds=0.02)
    host = ParameterServer(ServerRegistration("run", "server-0"), "", kernel_threads=1)
    requests = link._requests(host)
    assert (await anext(requests)).HasField("hello")
    assert (await anext(requests)).HasField("heartbeat")
    link._up.put_nowait(pb.SessionRequest(join_answer=pb.SessionRequest.JoinAnswer(proposal_id=7)))
    assert (await anext(requests)).join_answer.proposal_id == 7
    with pytest.raises(TimeoutError):  # And no CancelledError.
        async with asyncio.timeout(0.1):
            await asyncio.Event().wait()
    assert (await anext(requests)).HasField("heartbeat")
    await requests.aclose()
    await link.close()
    await host.close()
