"""Roles on live processes: every call with every role, and a run whose members hold nothing but tokens of their roles.

One cluster: a scheduler and a server with the run's own token, and a server with a token of its role. Denied calls
carry a body that is no message, so that a refusal shows that nobody read it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import psdist
from psdist import errors
from psdist.cli.main import PSDIST
from psdist.launcher.embedded import EmbeddedCluster
from psdist.launcher.plan import program
from psdist.security.roles import RIGHTS, TOKEN_ROLES, Role
from psdist.security.tokens import Audience, create
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc, server_pb2
from psdist.wire import auth, limits, status
from tests.support.channels import open_channel

pytestmark = pytest.mark.asyncio(loop_scope="session")

_NO_MESSAGE = b"\xff\xff\xff"
_STANDARD = (
    *health_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
)
_REFUSED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
#: A worker that adds up an array with another one.
_COLLECTIVE = """
import numpy as np
import psdist

with psdist.init() as context:
    print(context.new_group().all_reduce(np.full(2, context.rank + 1.0, np.float32)).tolist())
"""
INIT = {"w": np.zeros((90, 99), np.float32), "b": np.zeros(90, np.float32)}


class Run(NamedTuple):
    """A cluster, and the address of the server that holds a token of its role."""

    cluster: EmbeddedCluster
    server: str

    def token(self, role: Role) -> str:
        return create(self.cluster.token, role, 0 if role is Role.WORKER else 4_000_000_000)

    async def call(self, role: Role, method: str, request: Any) -> Any:
        """Make a unary call to the scheduler."""
        async with open_channel(self.cluster.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await getattr(stub, method)(request, metadata=auth.metadata(self.token(role)), timeout=60)

    async def members(self) -> dict[str, pb.MemberStatus]:
        answer: pb.GetStatusResponse = await self.call(Role.READER, "GetStatus", pb.GetStatusRequest())
        return {member.member_id: member for member in answer.members}

    async def client(self, **arguments: Any) -> psdist.AsyncClient:
        """Connect a worker that holds a token of its role."""
        named = {"token": self.token(Role.WORKER), "connect_timeout": 60.0}
        return await psdist.AsyncClient(self.cluster.address, **(named | arguments)).connect()


def _start_server(scheduler: str, token: str) -> subprocess.Popen[bytes]:
    flags = ("--scheduler", scheduler, "--server-id", "by-role", "--log-level", "error")
    return subprocess.Popen([*program("psdist_server"), *flags], env=os.environ | {"PSDIST_TOKEN": token})


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def run() -> AsyncIterator[Run]:
    cluster = await asyncio.to_thread(EmbeddedCluster, 1)
    process = _start_server(cluster.address, create(cluster.token, Role.SERVER))
    try:
        async with open_channel(cluster.address) as channel, asyncio.timeout(120):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            follow = pb.WatchEventsRequest(follow=True)
            waiting = {"server-0", "by-role"}
            async for answer in stub.WatchEvents(follow, metadata=auth.metadata(create(cluster.token, Role.READER))):
                waiting -= {name for event in answer.events for name in waiting if name in event.text}
                if not waiting:
                    break
        found = Run(cluster, "")
        yield Run(cluster, (await found.members())["by-role"].address)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        await asyncio.to_thread(cluster.close)


async def _outcome(channel: grpc.aio.Channel, call: str, metadata: Any) -> grpc.StatusCode:
    """Return the status of a call with a body that its method cannot read; OK once it has answered."""
    body = b"" if call.startswith("/grpc.") else _NO_MESSAGE  # The standard services answer an empty request.
    # Not a stream of requests: if it is refused while grpc.aio sends one, the status is lost.
    stream = channel.unary_stream(call)(body, metadata=metadata, timeout=60)
    try:
        await stream.read()
        stream.cancel()
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as failure:
        return failure.code()


async def _outcomes(address: str, service: ServiceDescriptor, metadata: Any) -> dict[str, grpc.StatusCode]:
    services = (service, *_STANDARD)
    calls = [f"/{one.full_name}/{method.name}" for one in services for method in one.methods]
    async with open_channel(address) as channel:
        found = await asyncio.gather(*(_outcome(channel, call, metadata) for call in calls))
    return dict(zip(calls, found, strict=True))


@pytest.mark.parametrize("role", TOKEN_ROLES)
@pytest.mark.parametrize("port", ["scheduler", "server", "server with its role's token"])
async def test_every_call_is_allowed_or_refused_as_documented(run: Run, role: Role, port: str) -> None:
    before = await run.members()
    address = {"scheduler": run.cluster.address, "server": before["server-0"].address}.get(port, run.server)
    module, audience = (pb, Audience.SCHEDULER) if port == "scheduler" else (server_pb2, Audience.SERVER)
    service = next(iter(module.DESCRIPTOR.services_by_name.values()))
    for shown in (auth.metadata(run.token(role), audience), (("authorization", f"Bearer {run.token(role)}"),)):
        found = await _outcomes(address, service, shown)
        wrong = {call: code for call, code in found.items() if (role in RIGHTS[call]) == (code in _REFUSED)}
        assert not wrong and len(found) > len(service.methods)
        assert {found[call] for call in found if role not in RIGHTS[call]} <= {grpc.StatusCode.PERMISSION_DENIED}
    after = await run.members()
    assert [(one.member_id, one.incarnation, one.state) for one in after.values()] == [
        (one.member_id, one.incarnation, one.state) for one in before.values()
    ]


@pytest.mark.parametrize("port", ["scheduler", "server with its role's token"])
async def test_without_a_token_of_this_run_only_the_health_check_answers(run: Run, port: str) -> None:
    module = pb if port == "scheduler" else server_pb2
    service = next(iter(module.DESCRIPTOR.services_by_name.values()))
    address = run.cluster.address if port == "scheduler" else run.server
    other = Audience.SERVER if port == "scheduler" else Audience.SCHEDULER
    for metadata in (
        (),
        auth.metadata(create("another-root", Role.ADMIN)),
        auth.metadata(create(run.cluster.token, Role.ADMIN, 1)),  # It has expired.
        auth.metadata(run.token(Role.ADMIN), other),
    ):
        found = await _outcomes(address, service, metadata)
        assert found.pop("/grpc.health.v1.Health/Check") is grpc.StatusCode.OK
        assert set(found.values()) == {grpc.StatusCode.UNAUTHENTICATED}


async def test_members_with_nothing_but_their_roles_tokens_train(run: Run) -> None:
    """Check that the weights are those of a run whose members hold the run's own token. Servers ask each other for
    norms."""
    adam = psdist.optim.Adam(lr=0.1, max_grad_norm=1.0)
    weights = {}
    for name, token in (("roles", run.token(Role.WORKER)), ("own", run.cluster.token)):
        clients = [await run.client(token=token, worker_id=f"{name}-{rank}", rank=rank) for rank in (0, 1)]
        handles = await asyncio.gather(*(client.parameters(name, INIT, adam) for client in clients))
        for step in range(3):
            gradient = {key: np.full(value.shape, step + 1.0, np.float32) for key, value in INIT.items()}
            results = await asyncio.gather(*(handle.push_pull(gradient) for handle in handles))
        weights[name] = results[0]
        assert {route.partition(" ")[0] for route in handles[0].participation.transports()} == {"server-0", "by-role"}
        await asyncio.gather(*(client.barrier("b") for client in clients))
        assert (await clients[0].status()).run_id == run.cluster.run_id
        for client in clients:
            await client.close()
    for key in INIT:
        assert weights["roles"][key].tobytes() == weights["own"][key].tobytes()


async def test_workers_with_different_tokens_of_their_role_link_to_each_other(run: Run) -> None:
    """Check that a worker accepts links by the key that came with its registration."""
    common = os.environ | {"PSDIST_SCHEDULER": run.cluster.address, "WORLD_SIZE": "2"}
    tokens = (create(run.cluster.token, Role.WORKER), create(run.cluster.token, Role.WORKER, 4_000_000_000))
    workers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _COLLECTIVE), env=common | {"PSDIST_TOKEN": token, "RANK": str(rank)}, stdout=PIPE
        )
        for rank, token in enumerate(tokens)
    ]
    async with asyncio.timeout(120):
        outputs = await asyncio.gather(*(worker.communicate() for worker in workers))
    assert [output for output, _ in outputs] == [b"[3.0, 3.0]\n"] * 2
    assert [worker.returncode for worker in workers] == [0, 0]


async def _denied(call: Any) -> errors.PsdistError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return status.from_call(failure.value, "the scheduler")


@pytest.mark.parametrize(
    ("role", "claimed"), [(Role.WORKER, pb.ROLE_SERVER), (Role.SERVER, pb.ROLE_WORKER)], ids=["worker", "server"]
)
async def test_nobody_registers_as_another_role(run: Run, role: Role, claimed: Any) -> None:
    before = set(await run.members())
    request = pb.RegisterRequest(
        protocol_version=limits.PROTOCOL_VERSION, role=claimed, member_id="intruder", address="127.0.0.1:9"
    )
    error = await _denied(run.call(role, "Register", request))
    assert type(error) is errors.PermissionDeniedError and f"this caller is {role.value}" in error.message
    assert set(await run.members()) == before


async def test_a_worker_ends_no_server_and_takes_no_session_of_one(run: Run) -> None:
    server = (await run.members())["by-role"]
    request = pb.LeaveRequest(member_id="by-role", incarnation=server.incarnation, reason="done")
    error = await _denied(run.call(Role.WORKER, "Leave", request))
    assert type(error) is errors.PermissionDeniedError and "the end of by-role, a server," in error.message
    async with open_channel(run.cluster.address) as channel:
        hello = pb.SessionRequest(hello=pb.SessionRequest.Hello(member_id="by-role", incarnation=server.incarnation))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        session = stub.Session(iter([hello]), metadata=auth.metadata(run.token(Role.WORKER)), timeout=60)
        error = await _denied(session.read())
    assert type(error) is errors.PermissionDeniedError and "a session of by-role, a server," in error.message
    after = (await run.members())["by-role"]
    assert (after.state, after.incarnation) == ("live", server.incarnation)


async def test_a_worker_saves_snapshots_in_its_own_name_alone(run: Run) -> None:
    async def save(role: Role) -> Any:
        async with open_channel(run.cluster.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            call = stub.SaveSnapshot(pb.SaveSnapshotRequest(), metadata=auth.metadata(run.token(role)), timeout=60)
            return await call.read()

    assert type(await _denied(save(Role.WORKER))) is errors.PermissionDeniedError
    assert type(await _denied(save(Role.ADMIN))) is errors.NoStorageError


async def test_a_command_names_the_role_that_it_needs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"PSDIST_SCHEDULER": run.cluster.address, "PSDIST_TOKEN": run.token(Role.READER)}
    assert await asyncio.to_thread(PSDIST.run, ["status", "--format", "json", "--timeout", "60"], environ) == 0
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(PSDIST.run, ["scale", "servers", "3", "--timeout", "60"], environ)
    assert ended.value.code == 78
    assert "Scale needs the role admin, and this caller is reader" in capsys.readouterr().err


async def test_a_client_with_a_token_of_another_role_is_told_so(run: Run) -> None:
    with pytest.raises(errors.PermissionDeniedError, match=r"Register needs the role worker or server.*is reader"):
        await run.client(token=run.token(Role.READER))
