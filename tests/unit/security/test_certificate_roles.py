"""The role in a caller's certificate decides about its calls, as the table of rights says. Real TLS on loopback."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from psdist.errors import PermissionDeniedError
from psdist.security.certificates import KeyPair, make_authority
from psdist.security.roles import CERTIFICATE_ROLES, RIGHTS, SCHEDULER_SERVICE, Role
from psdist.security.tls import Credentials, TlsFiles
from psdist.security.tokens import create
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import auth, channels, status
from psdist.wire.services import service_handler
from tests.support.certificates import NOW, write_tls
from tests.support.channels import serving

SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]
CA: KeyPair = make_authority("psdist test CA", 365, NOW)
_NO_MESSAGE = b"\xff\xff\xff"


class Served:
    """A server of SchedulerService that tells each caller its role."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.reached: list[str] = []

    async def call(self, method: str, client: TlsFiles, token: str = "", body: bytes = b"") -> str:
        """Return the role that the handler of a method saw. Raises the error of the refusal."""
        async with channels.open_channel(self.address, Credentials(token, tls=client)) as channel:
            call = channel.unary_stream(f"/{SCHEDULER_SERVICE}/{method}")
            try:
                answer: bytes = await call(body, metadata=auth.metadata(token), timeout=60).read()
            except grpc.aio.AioRpcError as failure:
                raise status.from_call(failure, "the scheduler") from None
            return answer.decode()


@asynccontextmanager
async def roles_served(files: TlsFiles, token: str = "") -> AsyncIterator[Served]:
    served = Served("")

    def handler(name: str) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            served.reached.append(name)
            return auth.caller().value.encode()

        async def answers(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            yield await answer(request, context)

        return answers if SERVICE.methods_by_name[name].server_streaming else answer

    handlers = {method.name: handler(method.name) for method in SERVICE.methods}
    log = logging.getLogger("psdist.test")
    made = service_handler(SERVICE, handlers, log, run_id="this-run")
    credentials = Credentials(token, tls=files)
    async with serving(credentials, lambda server: server.add_generic_rpc_handlers((made,))) as served.address:
        yield served


@pytest.mark.parametrize("role", CERTIFICATE_ROLES)
async def test_every_call_is_allowed_or_denied_by_the_certificate(tmp_path: Path, role: Any) -> None:
    client = write_tls(tmp_path / "c", CA, role, run_id="this-run")
    async with roles_served(write_tls(tmp_path / "s", CA, "scheduler")) as served:
        for method in SERVICE.methods:
            if Role(role) in RIGHTS[f"/{SERVICE.full_name}/{method.name}"]:
                assert await served.call(method.name, client) == role
            else:
                # The body is no message, so that a refusal shows that nobody parsed it.
                with pytest.raises(PermissionDeniedError, match=rf"{method.name} needs the role .* is {role}"):
                    await served.call(method.name, client, body=_NO_MESSAGE)
        allowed = [name for name in (method.name for method in SERVICE.methods) if name in served.reached]
        assert served.reached == allowed and ("Scale" in allowed) == (role == "admin")


async def test_a_certificate_of_another_run_is_refused(tmp_path: Path) -> None:
    async with roles_served(write_tls(tmp_path / "s", CA, "scheduler")) as served:
        with pytest.raises(PermissionDeniedError, match="for run 'other', and this is run 'this-run'"):
            await served.call("GetStatus", write_tls(tmp_path / "c", CA, "reader", run_id="other"))
        assert await served.call("GetStatus", write_tls(tmp_path / "d", CA, "reader")) == "reader"  # For any run.
        assert served.reached == ["GetStatus"]


@pytest.mark.parametrize(
    "uri", ["psdist://this-run/Reader", "psdist://this-run/boss", "psdist:///reader", "PSDIST://*/reader", "psdist://"]
)
async def test_a_misspelt_role_gives_no_rights(uri: str) -> None:
    """Certificates of another CA: without a role URI a caller of a run without a token has all rights."""
    with pytest.raises(PermissionDeniedError, match="which is no role: it must be psdist://RUN/ROLE"):
        auth.certificate_role(["node-1", uri], Role.ALL, "/psdist.v1.SchedulerService/GetStatus", "this-run")
    assert auth.certificate_role(["node-1", "spiffe://a/b"], Role.ALL, "/any/Call", "this-run") is None


async def test_the_run_s_own_token_does_not_widen_a_certificate(tmp_path: Path) -> None:
    client = write_tls(tmp_path / "c", CA, "worker")
    async with roles_served(write_tls(tmp_path / "s", CA, "scheduler"), "root") as served:
        assert await served.call("Register", client, "root") == "worker"
        assert await served.call("Register", client, create("root", Role.WORKER)) == "worker"
        with pytest.raises(PermissionDeniedError, match="Scale needs the role admin, and this caller is worker"):
            await served.call("Scale", client, "root")
        with pytest.raises(PermissionDeniedError, match="certificate is of role worker, and the token of role admin"):
            await served.call("SaveSnapshot", client, create("root", Role.ADMIN))
