"""The call by which a worker finds out whether a server answers."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from psdist.client.transport.grpc import GrpcTransport
from psdist.errors import ServerUnreachableError, TlsHandshakeError
from psdist.security import tokens
from psdist.security.roles import Role
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience, Verifier
from psdist.v1 import server_pb2 as pb
from psdist.wire.services import add_standard_services
from tests.support.certificates import make_ca, write_tls
from tests.support.channels import serving

ROOT = "the run's own token"
CA, OTHER_CA = make_ca(), make_ca("other CA")


def served(credentials: Credentials) -> AbstractAsyncContextManager[str]:
    """Serve no method but the health check. Returns the address."""
    service, verifier = pb.DESCRIPTOR.services_by_name["ServerService"], Verifier(credentials.token, Audience.SERVER)
    return serving(
        credentials, lambda server: add_standard_services(server, service, reflects=False), verifier=verifier
    )


async def call(address: str, credentials: Credentials) -> None:
    transport = GrpcTransport(credentials)
    try:
        await transport.call_server(address)
    finally:
        await transport.close()


async def test_worker_may_make_it(caplog: pytest.LogCaptureFixture) -> None:
    """With a worker's token and with the run's: the server logs no refusal, which would repeat every second."""
    async with served(Credentials(ROOT)) as address:
        with caplog.at_level(logging.DEBUG, "psdist.auth"):
            await call(address, Credentials(ROOT))
            await call(address, Credentials(tokens.create(ROOT, Role.WORKER)))
    assert not caplog.records
    with pytest.raises(ServerUnreachableError):
        await call(address, Credentials(ROOT))


async def test_causes_of_failed_tls(tmp_path: Path) -> None:
    """The reason that a worker waits for, and reports to the scheduler, has the remedy."""
    async with served(Credentials(tls=write_tls(tmp_path / "s", CA, "server"))) as address:
        await call(address, Credentials(tls=write_tls(tmp_path / "ok", CA)))
        with pytest.raises(TlsHandshakeError, match=r"not of a CA in .*: give both sides the same CA"):
            await call(address, Credentials(tls=write_tls(tmp_path / "other", OTHER_CA)))
        with pytest.raises(TlsHandshakeError, match="demands TLS"):
            await call(address, Credentials(ROOT))
