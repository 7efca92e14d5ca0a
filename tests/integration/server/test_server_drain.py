"""The log of a server that is asked to end while its scheduler is gone."""

from __future__ import annotations

from structlog.testing import capture_logs

from psdist.addresses import free_port
from psdist.security.tls import Credentials
from psdist_server.server_session import ServerSession


async def test_a_server_whose_scheduler_is_gone_says_in_one_sentence_why_it_is_not_drained() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    session = ServerSession(address, Credentials("token"), "127.0.0.1:1", "server-0", "run")
    with capture_logs() as logs:
        await session.drain(60.0)
    await session.close()
    (line,) = logs
    assert line["event"] == "not drained" and "\n" not in line["reason"], line
    assert line["reason"].startswith(f"the scheduler at {address}: UNAVAILABLE: "), line
