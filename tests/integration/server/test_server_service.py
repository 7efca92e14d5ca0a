"""The server's data path over real gRPC, with a cluster map made by hand and clients made of raw messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from psdist import optim
from psdist.consistency import ASP, BSP
from psdist.errors import (
    FencedError,
    FutureStepError,
    InvalidArgumentError,
    NonFiniteGradientError,
    PsdistError,
    StaleEpochError,
    UnauthenticatedError,
    UnknownCodecError,
    UnknownParametersError,
    WrongRunError,
)
from psdist.security.tls import Credentials
from psdist.types import (
    ClusterMap,
    ParametersEntry,
    ParametersMember,
    ParametersSpec,
    Replica,
    ServerEntry,
    Shard,
    WorkerEntry,
)
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.v1 import server_pb2_grpc
from psdist.wire import auth, channels, frames, status
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.service import ServerService
from tests.support.channels import open_channel

TOKEN = "secret"
TOTAL, SLICE = 25, 10
INITIAL = np.linspace(-1, 1, TOTAL, dtype=np.float32)
GRADIENT = np.arange(TOTAL, dtype=np.float32)


def entry(workers: int, *, ready: bool, **settings: Any) -> ParametersEntry:
    given = {"optimizer": optim.SGD(lr=0.5), "consistency": BSP()} | settings
    spec = ParametersSpec("p", slice_elements=SLICE, **given)
    members = tuple(ParametersMember(f"worker-{rank}", 1, rank) for rank in range(workers))
    return ParametersEntry(spec, TOTAL, (Shard(Replica("server-0", 1)),) * 2, members, ready=ready)


def cluster_map(epoch: int, what: ParametersEntry, address: str = "", live: int | None = None) -> ClusterMap:
    members = what.members if live is None else what.members[:live]
    workers = tuple(WorkerEntry(m.worker_id, m.incarnation, m.rank) for m in members)
    return ClusterMap("run", epoch, (ServerEntry("server-0", 1, address),), workers, (what,))


class Bench:
    """One server on a free port and the messages of a test."""

    def __init__(self, host: ParameterServer, channel: grpc.aio.Channel) -> None:
        self.host = host
        self.channel = channel
        self.stub = server_pb2_grpc.ServerServiceStub(channel)
        self.epoch = 0

    async def follow(self, what: ParametersEntry, live: int | None = None) -> None:
        self.epoch += 1
        await self.host.adopt_map(cluster_map(self.epoch, what, live=live))

    async def create(self, workers: int = 1, **settings: Any) -> None:
        await self.follow(entry(workers, ready=False, **settings))
        requests = [pb.InstallRequest(slice=i, payload=part.tobytes()) for i, part in enumerate(cut(INITIAL))]
        requests[0].identity.CopyFrom(self.identity())
        await self.stub.Install(iter(requests), metadata=auth.metadata(TOKEN))
        await self.follow(entry(workers, ready=True, **settings))

    def identity(self, worker: int = 0, **changes: Any) -> pb.Identity:
        given = {"run_id": "run", "worker_id": f"worker-{worker}", "incarnation": 1, "epoch": self.epoch}
        return pb.Identity(**(given | {"parameters": "p"} | changes))

    def header(self, step: int, worker: int = 0, **changes: Any) -> pb.PushHeader:
        raw = {"codec": cpb.CODEC_RAW, "dtype": cpb.DTYPE_FLOAT32, "pull_dtype": cpb.DTYPE_FLOAT32}
        given = raw | {"identity": self.identity(worker), "step": step}
        return pb.PushHeader(**(given | changes))

    async def push_pull(self, header: pb.PushHeader, parts: Iterable[bytes], first: int = 0) -> np.ndarray:
        requests = [pb.PushPullRequest(slice=first + i, payload=part) for i, part in enumerate(parts)]
        requests[0].header.CopyFrom(header)
        answers = {}
        call = self.stub.PushPull(metadata=auth.metadata(TOKEN))
        try:
            for request in requests:
                # One slice up, one down: a write that fails hides the server's own status (grpc issue 36066).
                await call.write(request)
                if (answer := await call.read()) is grpc.aio.EOF:
                    break
                answers[answer.slice] = answer.payload
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return np.frombuffer(b"".join(answers[index] for index in sorted(answers)), np.float32)

    async def pull(self, identity: pb.Identity, dtype: int = cpb.DTYPE_FLOAT32) -> bytes:
        request = pb.PullRequest(identity=identity, dtype=dtype)
        try:
            parts = [answer async for answer in self.stub.Pull(request, metadata=auth.metadata(TOKEN))]
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        return b"".join(part.payload for part in sorted(parts, key=lambda part: part.slice))


def cut(values: np.ndarray) -> list[np.ndarray]:
    return [values[start : start + SLICE] for start in range(0, len(values), SLICE)]


def payloads(values: np.ndarray) -> list[bytes]:
    return [part.tobytes() for part in cut(values)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(TOKEN), kernel_threads=1)
    server = channels.make_server(Credentials(TOKEN))
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    server.add_generic_rpc_handlers((ServerService(host).handler(),))
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Bench(host, channel)
    await server.stop(0)
    await host.close()


async def test_a_step_of_one_worker(bench: Bench) -> None:
    await bench.create()
    weights = await bench.push_pull(bench.header(0), payloads(GRADIENT))
    assert weights.tobytes() == (INITIAL - np.float32(0.5) * GRADIENT).tobytes()
    assert await bench.pull(bench.identity()) == weights.tobytes()


async def test_fields_in_another_order_are_read_too(bench: Bench) -> None:
    await bench.create()
    parts = payloads(GRADIENT)
    heads = [pb.PushPullRequest(slice=i) for i in range(len(parts))]
    heads[0].header.CopyFrom(bench.header(0))
    reordered = [
        pb.PushPullRequest(payload=part).SerializeToString() + head.SerializeToString()
        for part, head in zip(parts, heads, strict=True)
    ]
    assert frames.unpack(pb.PushPullRequest, reordered[0]).payload == parts[0]


async def test_asynchronous_push_with_clipping_uses_the_norm_of_the_push(bench: Bench) -> None:
    await bench.create(consistency=ASP(), optimizer=optim.SGD(lr=1.0, max_grad_norm=1.0))
    norm = float(np.sqrt(np.sum(GRADIENT.astype(np.float64) ** 2)))
    weights = await bench.push_pull(bench.header(0, grad_norm=norm), payloads(GRADIENT))
    expected = INITIAL - GRADIENT * np.float32(1.0 / (norm + 1e-6))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="grad_norm"):
        await bench.push_pull(bench.header(1, grad_norm=float("nan")), payloads(GRADIENT))


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], type[PsdistError], str]] = [
    ("run", {"run_id": "other"}, {}, WrongRunError, "run 'run'"),
    ("worker", {"worker_id": "worker-9"}, {}, FencedError, "worker-9"),
    ("incarnation", {"incarnation": 0}, {}, FencedError, "incarnation 0"),
    ("epoch", {"epoch": 1}, {}, StaleEpochError, "epoch 1"),
    ("parameters", {"parameters": "q"}, {}, UnknownParametersError, "'q'"),
    ("codec", {}, {"codec": 77}, UnknownCodecError, "77"),
    ("dtype", {}, {"dtype": cpb.DTYPE_FLOAT64}, InvalidArgumentError, "float64"),
    ("step", {}, {"step": 7}, FutureStepError, "step 7"),
]


@pytest.mark.parametrize(("identity", "header", "error", "match"), [case[1:] for case in REFUSALS], ids=lambda x: "")
async def test_refused_requests_change_nothing(
    bench: Bench, identity: dict[str, Any], header: dict[str, Any], error: type[PsdistError], match: str
) -> None:
    await bench.create()
    before = await bench.pull(bench.identity())
    wrong = bench.header(**({"step": 0, "identity": bench.identity(**identity)} | header))
    with pytest.raises(error, match=match):
        await bench.push_pull(wrong, payloads(GRADIENT))
    assert await bench.pull(bench.identity()) == before
    await bench.push_pull(bench.header(0), payloads(GRADIENT))


@pytest.mark.parametrize(
    ("parts", "first", "match"),
    [
        ([b"\0" * 39], 0, "40 bytes in float32, not 39"),
        ([b"\0" * 20], 2, ""),
        ([b"\0" * 40], 3, "slice 3 .* is not on this server"),
    ],
)
async def test_wrong_slices_are_refused(bench: Bench, parts: list[bytes], first: int, match: str) -> None:
    await bench.create()
    if not match:
        await bench.push_pull(bench.header(0), parts, first)
        return
    with pytest.raises(InvalidArgumentError, match=match):
        await bench.push_pull(bench.header(0), parts, first)
    await bench.push_pull(bench.header(0), payloads(GRADIENT))


async def test_non_finite_gradient_is_rejected_or_left_out(bench: Bench) -> None:
    await bench.create()
    bad = GRADIENT.copy()
    bad[3] = np.nan
    with pytest.raises(NonFiniteGradientError, match="elements 0 to 9"):
        await bench.push_pull(bench.header(0), payloads(bad))
    await bench.push_pull(bench.header(0), payloads(GRADIENT))
    assert bench.host.statistics().parameters[0].workers[0].non_finite == 1


async def test_a_stream_whose_second_slice_is_refused_keeps_the_first(bench: Bench) -> None:
    """Check that each slice is taken or refused by itself. In a repetition of the push, slices that were taken are
    ignored."""
    await bench.create(consistency=ASP())
    first, second, third = payloads(GRADIENT)
    with pytest.raises(InvalidArgumentError, match="slice 1 has 40 bytes in float32, not 39"):
        await bench.push_pull(bench.header(0), [first, second[1:], third])
    expected = INITIAL - np.float32(0.5) * GRADIENT
    partly = np.frombuffer(await bench.pull(bench.identity()), np.float32)
    assert partly.tobytes() == np.concatenate([expected[:SLICE], INITIAL[SLICE:]]).tobytes()
    whole = await bench.push_pull(bench.header(0), [first, second, third])
    assert whole.tobytes() == expected.tobytes()
    assert bench.host.statistics().parameters[0].workers[0].duplicates == 1


async def test_a_second_header_is_refused(bench: Bench) -> None:
    """Check a second header, which would change the sender or the call in the middle of a stream."""
    await bench.create(consistency=ASP())
    parts = payloads(GRADIENT)
    requests = [pb.PushRequest(slice=i, payload=part, header=bench.header(i)) for i, part in enumerate(parts)]
    call = bench.stub.Push(iter(requests), metadata=auth.metadata(TOKEN))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in call]
    error = status.from_call(caught.value, "server")
    assert isinstance(error, InvalidArgumentError) and "has a second header: only the first may" in error.message
    weights = await bench.push_pull(bench.header(0), parts)
    assert weights.tobytes() == (INITIAL - np.float32(0.5) * GRADIENT).tobytes()


async def test_a_second_identity_is_refused(bench: Bench) -> None:
    await bench.follow(entry(1, ready=False))
    parts = payloads(INITIAL)
    requests = [pb.InstallRequest(slice=i, payload=part, identity=bench.identity()) for i, part in enumerate(parts)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Install(iter(requests), metadata=auth.metadata(TOKEN))
    error = status.from_call(caught.value, "server")
    assert isinstance(error, InvalidArgumentError) and "has a second identity: only the first may" in error.message
    assert bench.host.admission.store("p").dense.installed == {0}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_initial_values_must_be_finite(bench: Bench, bad: float) -> None:
    await bench.follow(entry(1, ready=False))
    values = np.where(np.arange(TOTAL) == SLICE + 3, np.float32(bad), INITIAL)
    requests = [pb.InstallRequest(slice=i, payload=part.tobytes()) for i, part in enumerate(cut(values))]
    requests[0].identity.CopyFrom(bench.identity())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Install(iter(requests), metadata=auth.metadata(TOKEN))
    error = status.from_call(caught.value, "server")
    assert isinstance(error, InvalidArgumentError) and "NaN or Inf in elements 10 to 19 (slice 1)" in error.message
    assert bench.host.admission.store("p").dense.installed == {0}
    assert bench.host.installed_slices("p") == 1
    await bench.create()
    await bench.push_pull(bench.header(0), payloads(GRADIENT))


async def test_a_base_version_of_the_future_is_refused(bench: Bench) -> None:
    await bench.create(consistency=ASP("inverse"))
    request = pb.PushPullRequest(header=bench.header(0), slice=0, base_version=9, payload=payloads(GRADIENT)[0])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in bench.stub.PushPull(iter([request]), metadata=auth.metadata(TOKEN))]
    error = status.from_call(caught.value, "server")
    assert isinstance(error, InvalidArgumentError)
    assert "base_version=9 of slice 0 is in the future: the slice is at version 0" in error.message
    weights = await bench.push_pull(bench.header(0), payloads(GRADIENT))
    assert weights.tobytes() == (INITIAL - np.float32(0.5) * GRADIENT).tobytes()


async def test_a_pull_names_each_slice_once(bench: Bench) -> None:
    """Check a repeated slice. Otherwise one small request could make a server hold millions of answers."""
    await bench.create()
    request = pb.PullRequest(identity=bench.identity(), dtype=cpb.DTYPE_FLOAT32, slices=[1, 1])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Pull(request, metadata=auth.metadata(TOKEN)).read()
    error = status.from_call(caught.value, "server")
    assert isinstance(error, InvalidArgumentError) and "ascending" in error.message


async def test_an_endless_name_gets_its_typed_error_all_the_same(bench: Bench) -> None:
    await bench.create()
    with pytest.raises(UnknownParametersError):
        await bench.pull(bench.identity(parameters="x" * 100_000))


async def test_initial_values_of_a_fenced_worker_are_refused_in_the_middle_of_its_stream(bench: Bench) -> None:
    await bench.follow(entry(2, ready=False))
    call = bench.stub.Install(metadata=auth.metadata(TOKEN))
    first, second, _ = payloads(INITIAL)
    await call.write(pb.InstallRequest(identity=bench.identity(worker=1), slice=0, payload=first))
    while not bench.host.admission.store("p").dense.installed:
        await grpc_turn(bench)
    await bench.follow(entry(2, ready=False), live=1)
    await call.write(pb.InstallRequest(slice=1, payload=second))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert isinstance(status.from_call(caught.value, "server"), FencedError)
    assert bench.host.admission.store("p").dense.installed == {0}


async def test_wrong_token_is_refused(bench: Bench) -> None:
    await bench.create()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.GetStatistics(pb.GetStatisticsRequest(), metadata=auth.metadata("wrong"))
    assert isinstance(status.from_call(caught.value, "server"), UnauthenticatedError)


async def test_expelled_worker_is_fenced_in_the_middle_of_a_wait(bench: Bench) -> None:
    await bench.create(workers=2)
    requests = [pb.PushPullRequest(slice=i, payload=part) for i, part in enumerate(payloads(GRADIENT))]
    requests[0].header.CopyFrom(bench.header(0))
    call = bench.stub.PushPull(iter(requests), metadata=auth.metadata(TOKEN))
    while not bench.host.admission.store("p").counters.bytes_held:
        await grpc_turn(bench)
    gone = ParametersEntry(
        entry(2, ready=True).spec,
        TOTAL,
        (Shard(Replica("server-0", 1)),) * 2,
        entry(2, ready=True).members[1:],
        ready=True,
    )
    bench.epoch += 1
    await bench.host.adopt_map(cluster_map(bench.epoch, gone))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(status.from_call(caught.value, "server"), FencedError)


async def test_a_proposal_holds_its_step_until_it_is_withdrawn(bench: Bench) -> None:
    await bench.create()
    assert bench.host.propose("p", ParametersMember("worker-1", 1, 1, first_step=0)) == (True, 0)
    assert bench.host.proposals == {("p", "worker-1")}
    requests = [pb.PushPullRequest(slice=i, payload=part) for i, part in enumerate(payloads(GRADIENT))]
    requests[0].header.CopyFrom(bench.header(0))
    call = bench.stub.PushPull(iter(requests), metadata=auth.metadata(TOKEN))
    while not bench.host.admission.store("p").counters.bytes_held:
        await grpc_turn(bench)
    bench.host.withdraw("p", "worker-1")
    assert [answer.version async for answer in call] == [1, 1, 1]
    assert bench.host.proposals == set()


async def grpc_turn(bench: Bench) -> None:
    """Make one round trip: everything sent before it has reached the server's loop."""
    await bench.stub.GetStatistics(pb.GetStatisticsRequest(), metadata=auth.metadata(TOKEN))


async def test_server_holds_at_most_two_slices_of_a_stream(bench: Bench) -> None:
    await bench.create(workers=2)
    requests = [pb.PushPullRequest(slice=i, payload=part) for i, part in enumerate(payloads(GRADIENT))]
    requests[0].header.CopyFrom(bench.header(0))
    call = bench.stub.PushPull(iter(requests), metadata=auth.metadata(TOKEN))
    for _ in range(20):
        await grpc_turn(bench)
    assert bench.host.admission.store("p").counters.bytes_held == 2 * SLICE * 4
    weights = await bench.push_pull(bench.header(0, worker=1), payloads(GRADIENT))
    assert weights.tobytes() == (INITIAL - np.float32(0.5) * GRADIENT).tobytes()
    assert len([answer async for answer in call]) == 3
