"""The causes of failed TLS: each is refused soon, and the error of the client names cause and remedy."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc
import grpc.aio
import pytest

from psdist.errors import TlsHandshakeError
from psdist.security import certificates
from psdist.security.roles import Role
from psdist.security.tls import Credentials, TlsFiles, explain
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import channels
from psdist.wire.scheduler_connection import MemberConnection
from tests.support.certificates import NOW, make_ca, write_tls
from tests.support.channels import serving

CA = make_ca()
OTHER_CA = make_ca("other CA")
BOTH = CA.cert + OTHER_CA.cert
DAY = datetime.timedelta(days=1)


@asynccontextmanager
async def serving_unchecked(files: TlsFiles) -> AsyncIterator[str]:
    """Yield the address of a server with a certificate that psdist's own would refuse to start with."""
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", unchecked(files))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def unchecked(files: TlsFiles) -> grpc.ServerCredentials:
    ca, cert, key = (Path(path).read_bytes() for path in (files.ca, files.cert, files.key))
    return grpc.ssl_server_credentials([(key, cert)], ca, True)


async def cause(address: str, credentials: Credentials) -> str:
    error = await explain(address, credentials)
    return "" if error is None else error.message


async def test_causes_at_a_server_with_tls(tmp_path: Path) -> None:
    async with serving(Credentials(tls=write_tls(tmp_path / "s", CA, "server"))) as address:
        assert await cause(address, Credentials(tls=write_tls(tmp_path / "ok", CA))) == ""
        refused = await cause(address, Credentials(tls=write_tls(tmp_path / "a", OTHER_CA, trusted=BOTH)))
        assert f"it refuses {tmp_path / 'a' / 'cert.pem'}" in refused and "same CA on both sides" in refused
        stranger = await cause(address, Credentials(tls=write_tls(tmp_path / "b", OTHER_CA)))
        assert "its certificate is not of a CA in" in stranger and "--tls-ca" in stranger
        assert "demands TLS, and this process uses none: set --tls-ca" in await cause(address, Credentials("token"))
        name = address.replace("127.0.0.1", "localhost")
        assert await cause(name, Credentials(tls=write_tls(tmp_path / "ok", CA))) == ""


async def test_causes_at_a_server_without_tls(tmp_path: Path) -> None:
    async with serving(Credentials()) as address:
        assert await cause(address, Credentials("token")) == ""
        assert "it uses plaintext" in await cause(address, Credentials(tls=write_tls(tmp_path, CA)))
    assert await cause(address, Credentials(tls=write_tls(tmp_path, CA))) == "", "nobody listens"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: write_tls(place, CA, "server", days=1, now=NOW - 2 * DAY), "has expired: renew it there"),
        (lambda place: write_tls(place, CA, "server", days=2, now=NOW + DAY), "not valid yet: compare the clocks"),
    ],
)
async def test_time_of_the_server(tmp_path: Path, make: Callable[[Path], TlsFiles], said: str) -> None:
    async with serving_unchecked(make(tmp_path / "s")) as address:
        assert said in await cause(address, Credentials(tls=write_tls(tmp_path / "c", CA)))


async def test_host_that_is_not_in_the_certificate(tmp_path: Path) -> None:
    """127.0.0.2 is this machine, too, but the certificate names 127.0.0.1."""
    server, files = grpc.aio.server(), write_tls(tmp_path, CA, "server")
    port = server.add_secure_port("127.0.0.2:0", files.server_credentials())
    await server.start()
    try:
        message = await cause(f"127.0.0.2:{port}", Credentials(tls=files))
    finally:
        await server.stop(0)
    assert "not for 127.0.0.2: issue it with --host 127.0.0.2" in message


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("admin", "its certificate is not for 127.0.0.1"),
        ("reader", "its certificate is not for 127.0.0.1"),
        ("worker", "not one of a scheduler or server at 127.0.0.1: either a worker listens there"),
    ],
)
async def test_certificate_of_a_caller_does_not_serve(tmp_path: Path, role: Role, said: str) -> None:
    """A reader or worker must not pass for the scheduler, though a worker's certificate names the same host."""
    client = Credentials(tls=write_tls(tmp_path / "c", CA))
    async with serving(Credentials(tls=write_tls(tmp_path / "s", CA, role))) as address:
        assert said in await cause(address, client)
        channel = channels.open_channel(address, client)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/any/Call")(b"", timeout=50)
        await channel.close()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_certificates_without_service_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Those made by earlier releases trust each other, and are refused by whoever has a newer one."""
    newer = Credentials(tls=write_tls(tmp_path / "new", CA))
    monkeypatch.setattr(certificates, "_role_names", lambda role, hosts: ())
    old, old_server = (write_tls(tmp_path / role, CA, role) for role in ("worker", "server"))
    async with serving(Credentials(tls=old_server)) as address:
        place = address.replace("127.0.0.1", host)
        assert await cause(place, Credentials(tls=old)) == ""
        message = await cause(place, newer)
    assert f"lacks the name {host}.service.psdist.internal. Renew it there" in message
    assert f"--role ROLE --host {host} --overwrite" in message


async def test_certificate_that_expired_while_it_was_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Credentials(tls=write_tls(tmp_path / "s", CA, "server"))) as address:
        files = write_tls(tmp_path / "a", OTHER_CA, trusted=BOTH)
        files.identity()
        later = files.identity().not_after + 1.0
        monkeypatch.setattr("psdist.security.tls.time.time", lambda: later)
        assert "which has expired: renew it" in await cause(address, Credentials(tls=files))


async def test_registration_ends_with_the_cause_at_once(tmp_path: Path) -> None:
    """The script of a worker ends with the cause, although it would look for its scheduler for a minute."""
    plain = Credentials("token")
    async with serving(Credentials(tls=write_tls(tmp_path, CA, "scheduler"))) as address:
        connection = MemberConnection(address, "a test", plain, Random(1))
        try:
            async with asyncio.timeout(50):
                with pytest.raises(TlsHandshakeError, match="demands TLS"):
                    await connection.register(pb.RegisterRequest(), 600.0, (ConnectionError,), lambda error: None)
        finally:
            await connection.close()
