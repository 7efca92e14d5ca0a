"""The TLS identity of a process: its checks, its renewal, and gRPC with it."""

from __future__ import annotations

import datetime
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization

from psdist.errors import ConfigurationError, InsecureBindError, InsecureConnectError
from psdist.security.certificates import KeyPair
from psdist.security.roles import Role
from psdist.security.tls import Credentials, TlsFiles
from psdist.wire import channels
from tests.support.certificates import NOW, make_ca, write_tls
from tests.support.channels import serving

CA = make_ca()
OTHER_CA = make_ca("other CA")
DAY = datetime.timedelta(days=1)


def read_error(files: TlsFiles) -> str:
    with pytest.raises(ConfigurationError) as caught:
        files.identity()
    return caught.value.message


# --- the checks of files ----------------------------------------------------------------------------------------------


def test_identity_shows_names_and_validity(tmp_path: Path) -> None:
    identity = write_tls(tmp_path, CA, "server", run_id="run-1", hosts=("node-1.example", "10.0.0.7")).identity()
    assert ("URI", "psdist://run-1/server") in identity.names
    assert ("DNS", "node-1.example") in identity.names and ("IP Address", "10.0.0.7") in identity.names
    assert identity.not_after == int((NOW + 90 * DAY).timestamp())
    for secret in (identity.key, identity.ca):
        assert repr(secret) not in repr(identity)


def test_a_host_that_the_certificate_lacks_is_refused(tmp_path: Path) -> None:
    """Others would wait for a process that they cannot trust."""
    hosts = ("node-1.example", "10.0.0.7", "::1", "*.pods.example")
    files = write_tls(tmp_path, CA, Role.SERVER, hosts=hosts)
    for host in ("node-1.example", "NODE-1.example.", "10.0.0.7", "::1", "a.pods.example"):
        files.require_host(host)
    for host in ("node-2.example", "10.0.0.8", "pods.example", "a.b.pods.example"):
        with pytest.raises(ConfigurationError, match=f"cert.pem does not name {host}, .*--advertise.*--host {host}"):
            files.require_host(host)


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    files = write_tls(tmp_path, CA)
    os.unlink(getattr(files, missing))
    message = read_error(files)
    assert f"{missing}.pem (--tls-{missing}) cannot be read: No such file or directory" in message


@pytest.mark.parametrize("wrong", ["ca", "cert", "key"])
def test_file_of_another_kind_is_named(tmp_path: Path, wrong: str) -> None:
    files = write_tls(tmp_path, CA)
    Path(getattr(files, wrong)).write_text("-----BEGIN NOTHING-----\n")
    assert f"{wrong}.pem" in read_error(files) and "PEM" in read_error(files)


def test_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    files, other = write_tls(tmp_path / "a", CA), write_tls(tmp_path / "b", CA)
    assert "is not the key of the certificate" in read_error(TlsFiles(files.ca, files.cert, other.key))


def test_encrypted_key_is_refused_without_a_prompt(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA)
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    Path(files.key).write_bytes(key.private_bytes(encoding, form, locked))
    assert "is encrypted" in read_error(files)


def test_certificate_of_another_ca_is_refused(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA, trusted=OTHER_CA.cert)
    assert "peers would refuse the certificate" in read_error(files)


def test_expired_certificate_is_refused(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA, days=1, now=NOW - 2 * DAY)
    assert "expired at" in read_error(files) and "psdist certs" in read_error(files)


def test_certificate_of_tomorrow_is_refused(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA, days=2, now=NOW + DAY)
    assert "is not valid before" in read_error(files) and "clock" in read_error(files)


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_files_are_read_again_once_they_change(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA)
    first = files.identity()
    assert files.identity() is first
    write_tls(tmp_path, CA)
    assert files.identity().cert != first.cert
    assert files.server_context() is files.identity().server_context is not first.server_context


def test_relative_paths_stay_those_of_the_first_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tls(tmp_path, CA)
    files = TlsFiles("ca.pem", "cert.pem", Path("key.pem"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    first = files.identity()
    write_tls(tmp_path, CA)
    assert files.identity().cert == (tmp_path / "cert.pem").read_bytes() != first.cert


def test_identity_is_kept_while_files_do_not_fit_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_tls(tmp_path, CA)
    first, next_files = files.identity(), write_tls(tmp_path / "next", CA)
    os.replace(next_files.cert, files.cert)
    assert [files.identity() for _ in range(3)] == [first] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once for each change"
    os.replace(next_files.key, files.key)
    assert files.identity().cert == Path(files.cert).read_bytes() != first.cert


def test_files_that_vanish_keep_the_identity(tmp_path: Path) -> None:
    files = write_tls(tmp_path, CA)
    first = files.identity()
    os.unlink(files.key)
    assert files.identity() is first


def test_end_of_a_certificate_is_logged_a_week_ahead_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    credentials, now = Credentials(tls=write_tls(tmp_path, CA)), [0.0]
    end = credentials.certificate_not_after()
    assert end == int((NOW + 90 * DAY).timestamp()) and not caplog.records
    monkeypatch.setattr("psdist.security.tls.time.time", lambda: now[0])
    for days, logged in ((7.1, 0), (6.9, 1), (6.8, 1), (5.8, 2), (-1, 3)):
        now[0] = end - days * 86400
        assert credentials.certificate_not_after() == end
        assert len(caplog.records) == logged, days
    assert "psdist certs issue --overwrite" in caplog.text
    assert Credentials().certificate_not_after() == 0.0


# --- gRPC -------------------------------------------------------------------------------------------------------------


async def _identity(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    names: list[bytes] = context.auth_context()["x509_subject_alternative_name"]
    return b" ".join(names)


async def _both_ways(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


def served(files: TlsFiles) -> AbstractAsyncContextManager[str]:
    """Serve with this identity. Returns the address."""
    methods = {
        "Identity": grpc.unary_unary_rpc_method_handler(_identity),
        "BothWays": grpc.stream_stream_rpc_method_handler(_both_ways),
    }
    handlers = (grpc.method_handlers_generic_handler("test", methods),)
    return serving(Credentials(tls=files), lambda server: server.add_generic_rpc_handlers(handlers))


async def _call(channel: grpc.aio.Channel) -> bytes:
    answer: bytes = await channel.unary_unary("/test/Identity")(b"", timeout=60)
    return answer


async def test_grpc_server_sees_the_role(tmp_path: Path) -> None:
    client = write_tls(tmp_path / "c", CA, "reader", run_id="r")
    async with (
        served(write_tls(tmp_path / "s", CA, "server")) as address,
        channels.open_channel(address, Credentials(tls=client)) as channel,
    ):
        assert b"psdist://r/reader" in await _call(channel)


@pytest.mark.parametrize("what", ["plaintext", "other CA", "no certificate"])
async def test_grpc_server_refuses(tmp_path: Path, what: str) -> None:
    server = write_tls(tmp_path / "s", CA, "server")
    channel = {
        "plaintext": lambda address: channels.open_channel(address, Credentials("token")),
        "other CA": lambda address: channels.open_channel(
            address, Credentials(tls=write_tls(tmp_path / "c", OTHER_CA))
        ),
        "no certificate": lambda address: grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(CA.cert)),
    }[what]
    async with served(server) as address, channel(address) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(opened)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_ca_is_replaced_while_calls_continue(tmp_path: Path) -> None:
    """Both sides trust old and new CA, then change certificates, then drop the old CA. A stream lasts through it."""
    places: tuple[tuple[Path, Role], ...] = ((tmp_path / "s", Role.SERVER), (tmp_path / "c", Role.WORKER))
    both = CA.cert + OTHER_CA.cert
    server, client = (write_tls(place, CA, role) for place, role in places)
    async with served(server) as address, channels.open_channel(address, Credentials(tls=client)) as channel:
        call = channel.unary_unary("/test/Identity")
        stream = channel.stream_stream("/test/BothWays")(timeout=60)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        stages: list[tuple[KeyPair, bytes]] = [(CA, both), (OTHER_CA, both), (OTHER_CA, OTHER_CA.cert)]
        for issuer, trusted in stages:
            for place, role in places:  # One side after the other, so that they differ for a while.
                write_tls(place, issuer, role, trusted=trusted)
                assert b"psdist://" in await call(b"", timeout=60)
        await stream.write(b"after")
        assert await stream.read() == b"after"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        # Whoever still has the old certificate is refused.
        old = write_tls(tmp_path / "old", CA, trusted=both)
        async with channels.open_channel(address, Credentials(tls=old)) as late:
            with pytest.raises(grpc.aio.AioRpcError):
                await _call(late)


def test_beyond_loopback_tls_needs_no_permission(tmp_path: Path) -> None:
    with pytest.raises(InsecureBindError, match="--tls-ca, --tls-cert and --tls-key"):
        Credentials("token").require_private("10.0.0.1", "--host 10.0.0.1 listens")
    Credentials(tls=write_tls(tmp_path, CA)).require_private("10.0.0.1", "")
    Credentials(insecure=True).require_private("10.0.0.1", "")
    Credentials().require_private("127.0.0.1", "")


def test_no_token_goes_to_another_machine_in_plaintext(tmp_path: Path) -> None:
    for place in ("10.0.0.1:1", "head:29600", "127.0.0.1:1,10.0.0.1:1", "[2001:db8::1]:1"):
        with pytest.raises(InsecureConnectError, match=r"the token would be sent to .*--tls-ca.*--insecure"):
            Credentials("token").require_private_route(place)
        with pytest.raises(InsecureConnectError):
            channels.open_channel(place.rpartition(",")[2], Credentials("token"))
        Credentials("token", insecure=True).require_private_route(place)
        Credentials("token", tls=write_tls(tmp_path, CA)).require_private_route(place)
        Credentials().require_private_route(place)
    Credentials("token").require_private_route("127.0.0.1:1,[::1]:1,localhost:1")
