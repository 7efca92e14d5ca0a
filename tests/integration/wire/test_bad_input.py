"""Bad input during training: a typed error names the mistake, nothing changes, and no step is lost.

Real scheduler and servers. Two workers train in BSP all the time, and each update adds exactly 1 to every weight, so
that the version determines the weights: a lost, doubled or foreign contribution would show. Input that a well-behaved
client refuses by itself is sent by hand with the generated stubs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import psdist
from psdist import errors
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2, server_pb2
from psdist.wire import auth, limits, status
from tests.support.wire_peer import INIT, SGD, Peer, Training, check, gradient, refusal
from tests.support.wire_peer import training as training  # the fixture

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: A server that speaks another protocol version.
_OLDER_SERVER = """
import runpy
from psdist.wire import limits
limits.PROTOCOL_VERSION = limits.OLDEST_PROTOCOL = 99
runpy.run_module("psdist_server", run_name="__main__", alter_sys=True)
"""
_numbers = itertools.count()


@pytest_asyncio.fixture(loop_scope="session")
async def peer(training: Training) -> AsyncIterator[Peer]:
    made = Peer(training, auth.metadata(training.cluster.token))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def stranger(training: Training) -> AsyncIterator[Peer]:
    made = Peer(training, auth.metadata("wrong"))
    yield made
    await made.close()


# --- mistakes of a user of the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"v": np.zeros(3, np.float32)}, errors.UnknownTensorError, "'v'"),
        ({"b": np.zeros(91, np.float32)}, errors.ShapeMismatchError, r"'b'.*\(91,\).*\(90,\)"),
        ({"b": np.zeros(90, np.complex64)}, errors.DTypeMismatchError, "'b'.*complex64"),
        ({"b": np.array(["x"] * 90)}, errors.DTypeMismatchError, "'b'"),
        ({"b": None}, errors.MissingTensorError, "'b'"),
        ({"b": np.full(90, np.nan, np.float32)}, errors.NonFiniteGradientError, "'b'"),
        ({"b": np.full(90, -np.inf, np.float32)}, errors.NonFiniteGradientError, "'b'"),
    ],
    ids=["name", "shape", "dtype", "strings", "missing", "nan", "inf"],
)
async def test_a_gradient_that_does_not_fit(
    training: Training, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    wrong = {name: value for name, value in (gradient() | change).items() if value is not None}
    for handle in training.handles:
        for call in (handle.push, handle.push_pull):
            with pytest.raises(error, match=words):
                await call(wrong)
    await training.goes_on()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"init": {"w": np.zeros(9000, np.float32)}}, errors.LayoutMismatchError, "tensor 'b' is missing"),
        ({"init": INIT | {"b": np.zeros(91, np.float32)}}, errors.LayoutMismatchError, r"'b' has shape \(91,\)"),
        ({"init": INIT | {"b": np.zeros(90)}}, errors.LayoutMismatchError, "'b' has dtype float64"),
        ({"init": dict(reversed(INIT.items()))}, errors.LayoutMismatchError, "another order"),
        ({"optimizer": psdist.optim.SGD(lr=2.0)}, errors.SettingsMismatchError, "optimizer.lr is 2.0, not 1.0"),
        ({"consistency": psdist.SSP(2)}, errors.SettingsMismatchError, r"consistency is SSP.*BSP"),
        ({"non_finite": "skip"}, errors.SettingsMismatchError, "non_finite is 'skip', not 'reject'"),
        ({"slice_elements": 5}, errors.SettingsMismatchError, "slice_elements is 5, not 4096"),
        ({"compression": "zip"}, errors.UnknownCodecError, "'zip'"),
        ({"pull_dtype": "int8"}, errors.DTypeMismatchError, "'int8'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_attaching_with_something_else(
    training: Training, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with await training.join() as other:
        with pytest.raises(error, match=words):
            await other.parameters("model", **({"init": INIT, "optimizer": SGD} | change))
        await training.goes_on()
    await training.goes_on()


@pytest.mark.parametrize("consistency", [psdist.BSP(), psdist.SSP(1), psdist.ASP()], ids=["bsp", "ssp", "asp"])
@pytest.mark.parametrize("policy", ["reject", "skip"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_non_finite_gradients_by_policy(training: Training, consistency: Any, policy: Any, bad: float) -> None:
    """Check second parameters of the trainers' own clients, in each mode: a bad gradient counts for nothing there."""
    name = f"other-{next(_numbers)}"
    settings = {"init": INIT, "optimizer": SGD, "consistency": consistency, "non_finite": policy}
    one, two = await asyncio.gather(*(client.parameters(name, **settings) for client in training.clients))
    poisoned = gradient() | {"w": np.where(np.arange(8910).reshape(90, 99) == 8000, bad, -1.0).astype(np.float32)}
    if policy == "reject":
        with pytest.raises(errors.NonFiniteGradientError, match="'w'"):
            await one.push(poisoned)
        assert one.step == 0
        check(await two.pull(), 0)
        await asyncio.gather(one.push(gradient()), two.push(gradient()))
    else:
        await asyncio.gather(one.push(poisoned), two.push(gradient()))
        assert one.statistics().abstained == 1
    # BSP: the mean of the gradients that count. In other modes each push that counts is an update of its own.
    counted = 1 if policy == "skip" or isinstance(consistency, psdist.BSP) else 2
    check(await one.pull(), counted)
    check(await two.pull(), counted)
    await training.goes_on()


async def test_a_second_client_with_the_same_worker_id(training: Training) -> None:
    for arguments in ({"worker_id": "trainer-0"}, {"worker_id": "trainer-1", "rank": 1}, {"rank": 1}):
        with pytest.raises(errors.DuplicateMemberError, match=r"trainer-\d, process \d+ on"):
            await training.join(**arguments)
    await training.goes_on()


async def test_a_worker_that_does_not_belong(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnauthenticatedError, match="token"):
        await training.join(token="wrong")
    with pytest.raises(errors.WrongRunError, match="another-run"):
        await training.join(run_id="another-run")
    for name in ("PROTOCOL_VERSION", "OLDEST_PROTOCOL"):
        monkeypatch.setattr(limits, name, 99)
    with pytest.raises(errors.ProtocolMismatchError, match=r"99.*scheduler speaks 6: upgrade psdist of the scheduler"):
        await training.join()
    await training.goes_on()


@pytest.mark.parametrize(
    ("program", "flags", "token", "words"),
    [
        (_OLDER_SERVER, [], "", "protocol version 99, this scheduler speaks 6"),
        ("", ["--server-id", "server-0", "--start-timeout", "1"], "", "'server-0' is taken by server-0, process"),
        pytest.param("", ["--run-id", "another"], "", "not 'another'", marks=pytest.mark.long),
        ("", [], "wrong", "the token is missing or wrong"),
    ],
    ids=["protocol", "id", "run", "token"],
)
async def test_a_server_that_does_not_belong(
    training: Training, program: str, flags: list[str], token: str, words: str
) -> None:
    how = ["-c", program] if program else ["-P", "-m", "psdist_server"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *how, "--scheduler", training.cluster.address, *flags),
        env=os.environ | {"PSDIST_TOKEN": token or training.cluster.token},
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == (78 if token else 69), err
    assert words in err.decode() and b"Traceback" not in err, err
    await training.goes_on()


# --- what only another client could send ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message", "words"),
    [
        ("PushPull", server_pb2.PushPullRequest(), "PushPullRequest without a header"),
        ("Push", server_pb2.PushRequest(slice=1), "PushRequest without a header"),
        ("Push", server_pb2.PushRequest(header=server_pb2.PushHeader(step=7)), "PushHeader without an identity"),
        ("Pull", server_pb2.PullRequest(dtype=common.DTYPE_FLOAT32), "PullRequest without an identity"),
        ("Install", server_pb2.InstallRequest(payload=b"1234"), "InstallRequest without an identity"),
        ("Share", server_pb2.ShareRequest(attach=server_pb2.Attach(socket="x")), "Attach without an identity"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
async def test_a_call_that_does_not_say_who_sends(
    training: Training, peer: Peer, method: str, message: Any, words: str
) -> None:
    """Check a call without a sender: it is malformed, and belongs to no other run."""
    for address in list((await peer.addresses()).values())[1:]:
        path = f"/psdist.v1.ServerService/{method}"
        refused = await refusal(
            peer.channel(address).unary_unary(path)(message.SerializeToString(), metadata=peer.metadata)
        )
        assert type(refused) is errors.InvalidArgumentError and words in refused.message, refused
    await training.goes_on()


async def test_reflection_lists_services_for_a_caller_with_the_token(
    training: Training, peer: Peer, stranger: Peer
) -> None:
    standard = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    for role, address in (await peer.addresses()).items():
        service = "SchedulerService" if role == "scheduler" else "ServerService"
        assert await _services(peer, address) == standard | {f"psdist.v1.{service}"}
        # Nothing is written: grpc.aio replaces the status of a call that ends while it writes.
        refused = reflection_pb2_grpc.ServerReflectionStub(stranger.channel(address)).ServerReflectionInfo(
            metadata=stranger.metadata
        )
        assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED
    await training.goes_on()


async def _services(asker: Peer, address: str) -> set[str]:
    """Return the services that the process at ``address`` reports."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(asker.channel(address))
    (response,) = [r async for r in stub.ServerReflectionInfo(iter([request]), metadata=asker.metadata)]
    return {service.name for service in response.list_services_response.service}


async def test_refusals_of_grpc_itself_have_no_detail(training: Training, peer: Peer) -> None:
    """Check refusals by gRPC, which only their status identifies."""
    for role, address in (await peer.addresses()).items():
        channel = peer.channel(address)
        limit = limits.CONTROL_MESSAGE_BYTES if role == "scheduler" else limits.DATA_MESSAGE_BYTES
        for path, body, code in (
            ("/psdist.v1.NoService/NoMethod", b"", grpc.StatusCode.UNIMPLEMENTED),
            (_methods(role)[0], bytes(limit + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(path)(body, metadata=peer.metadata)
            assert caught.value.code() is code
            assert status.DETAIL_KEY not in [key for key, _ in caught.value.trailing_metadata() or ()]
    await training.goes_on()


async def test_bytes_that_are_no_message(training: Training, peer: Peer) -> None:
    for role, address in (await peer.addresses()).items():
        channel = peer.channel(address)
        for path in _methods(role):
            refused = await refusal(channel.unary_unary(path)(b"\xff" * 100, metadata=peer.metadata))
            assert isinstance(refused, errors.InvalidArgumentError), path
            assert "100 bytes are not a valid psdist.v1." in str(refused), path
    await training.goes_on()


# The process checks the limit before it reads the method, so a few methods stand for all.
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("role", ["scheduler", "server-0", "server-1"])
async def test_a_message_over_the_limit(training: Training, peer: Peer, role: str, every: int) -> None:
    limit = limits.CONTROL_MESSAGE_BYTES if role == "scheduler" else limits.DATA_MESSAGE_BYTES
    channel = peer.channel((await peer.addresses())[role])
    for path in _methods(role)[::every]:
        refused = await refusal(channel.unary_unary(path)(bytes(limit + 1), metadata=peer.metadata))
        assert isinstance(refused, errors.LimitExceededError) and str(limit) in str(refused), (path, refused)
    await training.goes_on()


async def test_metadata_over_the_limit(training: Training, peer: Peer) -> None:
    for role, address in (await peer.addresses()).items():
        (path, *_) = _methods(role)
        heavy = (*peer.metadata, ("x-heavy", "x" * 4 * limits.METADATA_BYTES))
        refused = await refusal(peer.channel(address).unary_unary(path)(b"", metadata=heavy))
        assert isinstance(refused, errors.LimitExceededError)
    await training.goes_on()


# --- who has no token -------------------------------------------------------------------------------------------------


def _methods(role: str) -> list[str]:
    """Return the paths of all methods of a scheduler or a server, read from the descriptors."""
    file, name = (scheduler_pb2, "SchedulerService") if role == "scheduler" else (server_pb2, "ServerService")
    service = file.DESCRIPTOR.services_by_name[name]
    return [f"/{service.full_name}/{method.name}" for method in service.methods]


async def test_without_the_token_no_method_reads_a_body(training: Training, stranger: Peer, peer: Peer) -> None:
    """Check with a body that is no message: parsing it would raise an error."""
    asked = 0
    for role, address in (await peer.addresses()).items():
        channel = stranger.channel(address)
        for path in _methods(role):
            for metadata in ((), stranger.metadata, (("authorization", training.cluster.token),)):
                refused = await refusal(channel.unary_unary(path)(b"\xff" * 100, metadata=metadata))
                assert isinstance(refused, errors.UnauthenticatedError) and "PSDIST_TOKEN" in str(refused), path
                asked += 1
    assert asked == 3 * (27 + 9 + 9)
    await training.goes_on()
