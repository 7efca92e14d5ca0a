"""Behaviour of gRPC alone: initial values, headers in the middle of a stream, and the window of two slices."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from psdist.errors import FencedError, InvalidArgumentError
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, status
from tests.support.server_bench import (
    GRADIENT,
    INITIAL,
    SLICE,
    STEPPED,
    TOKEN,
    TOTAL,
    ServerBench,
    entry,
    payloads,
    refusal,
)


def pushes(bench: ServerBench, message: Any = pb.PushPullRequest) -> list[Any]:
    """Return the messages of a push of worker-0."""
    requests = [message(slice=i, payload=part) for i, part in enumerate(payloads(GRADIENT))]
    requests[0].header.CopyFrom(bench.header(0))
    return requests


async def test_the_server_holds_at_most_two_slices_of_a_stream(bench: ServerBench) -> None:
    await bench.create(workers=2)
    call = bench.stub.PushPull(iter(pushes(bench)), metadata=auth.metadata(TOKEN))
    for _ in range(20):
        await bench.turn()
    assert bench.host.statistics().parameters[0].bytes_held == 2 * SLICE * 4
    weights = await bench.push_pull(bench.header(0, worker=1), payloads(GRADIENT))
    assert weights.tobytes() == STEPPED.tobytes()
    assert len([answer async for answer in call]) == 3


async def test_a_second_header_is_refused(bench: ServerBench) -> None:
    """Check a second header, which would change the sender or the call in the middle of a stream."""
    await bench.create()
    requests = pushes(bench, pb.PushRequest)
    requests[1].header.CopyFrom(bench.header(1))
    error = await refusal(bench.stub.Push(iter(requests[:2]), metadata=auth.metadata(TOKEN)))
    assert isinstance(error, InvalidArgumentError) and "has a second header: only the first may" in str(error)
    weights = await bench.push_pull(bench.header(0), payloads(GRADIENT))
    assert weights.tobytes() == STEPPED.tobytes()


async def test_a_push_without_a_header_is_refused(bench: ServerBench) -> None:
    await bench.create()
    error = await refusal(bench.stub.Push(iter([pb.PushRequest(slice=0)]), metadata=auth.metadata(TOKEN)))
    assert isinstance(error, InvalidArgumentError) and "PushRequest without a header" in str(error)


async def installed(bench: ServerBench, requests: list[pb.InstallRequest]) -> Exception:
    """Send initial values. Returns the error that refuses them."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Install(iter(requests), metadata=auth.metadata(TOKEN))
    return status.from_call(caught.value, "server")


async def test_a_second_identity_is_refused(bench: ServerBench) -> None:
    await bench.adopt(entry(1, ready=False))
    parts = payloads(INITIAL)
    requests = [pb.InstallRequest(slice=i, payload=part, identity=bench.identity()) for i, part in enumerate(parts)]
    error = await installed(bench, requests)
    assert isinstance(error, InvalidArgumentError) and "has a second identity: only the first may" in error.message
    assert bench.host.installed_slices("p") == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_initial_values_must_be_finite(bench: ServerBench, bad: float) -> None:
    await bench.adopt(entry(1, ready=False))
    values = np.where(np.arange(TOTAL) == SLICE + 3, np.float32(bad), INITIAL)
    requests = [pb.InstallRequest(slice=i, payload=part) for i, part in enumerate(payloads(values))]
    requests[0].identity.CopyFrom(bench.identity())
    error = await installed(bench, requests)
    assert isinstance(error, InvalidArgumentError) and "NaN or Inf in elements 10 to 19 (slice 1)" in error.message
    assert bench.host.installed_slices("p") == 1
    await bench.create()
    await bench.push_pull(bench.header(0), payloads(GRADIENT))


async def test_initial_values_of_a_fenced_worker_are_refused_in_the_middle_of_its_stream(bench: ServerBench) -> None:
    await bench.adopt(entry(2, ready=False))
    call = bench.stub.Install(metadata=auth.metadata(TOKEN))
    first, second, _ = payloads(INITIAL)
    await call.write(pb.InstallRequest(identity=bench.identity(worker=1), slice=0, payload=first))
    while not bench.host.installed_slices("p"):
        await bench.turn()
    await bench.adopt(entry(2, ready=False), live=1)
    await call.write(pb.InstallRequest(slice=1, payload=second))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert isinstance(status.from_call(caught.value, "server"), FencedError)
    assert bench.host.installed_slices("p") == 1
