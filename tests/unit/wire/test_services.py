"""Exceptions of a handler end its call as a status, for single answers and for streams, and end nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc

from psdist import errors
from psdist.v1 import server_pb2
from psdist.wire import status
from psdist.wire.services import Handler, as_psdist_error, service_handler

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
LOG = logging.getLogger("psdist.test")
STATISTICS = server_pb2.GetStatisticsRequest().SerializeToString()
PULL = server_pb2.PullRequest(min_version=7).SerializeToString()


async def _unused(*_: object) -> None:
    raise AssertionError("this method is not called")


@asynccontextmanager
async def _serve(**handlers: Handler) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    everything = dict.fromkeys((method.name for method in SERVICE.methods), _unused)
    server.add_generic_rpc_handlers((service_handler(SERVICE, everything | handlers, LOG),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def _statistics(channel: grpc.aio.Channel, request: bytes = STATISTICS) -> bytes:
    answer: bytes = await channel.unary_unary(f"/{SERVICE.full_name}/GetStatistics")(request)
    return answer


async def _pull(channel: grpc.aio.Channel, request: bytes = PULL) -> list[bytes]:
    return [answer async for answer in channel.unary_stream(f"/{SERVICE.full_name}/Pull")(request)]


def _raising(error: Exception) -> dict[str, Handler]:
    async def get_statistics(*_: object) -> Any:
        raise error

    async def pull(*_: object) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    return {"GetStatistics": get_statistics, "Pull": pull}


@pytest.mark.parametrize("call", [_statistics, _pull])
@pytest.mark.parametrize(
    ("raised", "arrives", "text"),
    [
        (errors.FencedError("incarnation 3 was expelled"), errors.FencedError, "incarnation 3 was expelled"),
        (KeyError("a password"), errors.InternalError, "failed: see the log"),
    ],
)
async def test_errors_arrive_as_statuses(
    call: Callable[..., Any],
    raised: Exception,
    arrives: type[errors.PsdistError],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _serve(**_raising(raised)) as channel:
        with caplog.at_level("INFO", LOG.name), pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel)
    error = status.from_call(failed.value, "the server")
    assert type(error) is arrives and text in error.message
    assert "a password" not in error.message
    # The log has a defect with its traceback, and a refusal as one line.
    assert ("a password" in caplog.text) == ("Traceback" in caplog.text) == isinstance(raised, KeyError)


@pytest.mark.parametrize("call", [_statistics, _pull])
async def test_a_caller_that_is_gone_is_no_traceback(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Check with the error that ``context.write`` raises once the call has ended."""
    async with _serve(**_raising(cygrpc.ExecuteBatchError("execute_batch", ()))) as channel:
        with caplog.at_level("INFO", LOG.name), suppress(grpc.aio.AioRpcError):
            await call(channel)
    assert LOG.name not in {record.name for record in caplog.records}


def test_a_stream_whose_caller_is_gone_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", LOG.name):
        assert type(as_psdist_error(grpc.aio.InternalError("x"), "reading a push", LOG)) is errors.ClosedError
    assert caplog.text == ""


@pytest.mark.parametrize("cls", [errors.SharingUnavailableError, errors.TcpUnavailableError])
async def test_a_transport_that_is_not_possible_is_no_line_of_the_log(
    cls: type[errors.PsdistError], caplog: pytest.LogCaptureFixture
) -> None:
    """Check the log: every run on several hosts starts with such refusals, and workers use another transport."""
    async with _serve(**_raising(cls("this worker is on another host"))) as channel:
        with caplog.at_level("INFO", LOG.name), pytest.raises(grpc.aio.AioRpcError):
            await _statistics(channel)
        assert "refused" not in caplog.text
        with caplog.at_level("DEBUG", LOG.name), pytest.raises(grpc.aio.AioRpcError):
            await _statistics(channel)
        assert "GetStatistics refused: this worker is on another host" in caplog.text


@pytest.mark.parametrize("call", [_statistics, _pull])
async def test_bytes_that_are_no_message_reach_no_handler(call: Callable[..., Any]) -> None:
    async with _serve(GetStatistics=_unused, Pull=_unused) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, b"\xff" * 100)
    assert type(status.from_call(failed.value, "the server")) is errors.InvalidArgumentError


async def test_requests_are_parsed_and_answers_serialized() -> None:
    async def get_statistics(request: object, _: object) -> Any:
        assert isinstance(request, server_pb2.GetStatisticsRequest)
        return server_pb2.PullResponse(version=3)

    async def pull(request: server_pb2.PullRequest, _: object) -> AsyncIterator[Any]:
        yield server_pb2.PullResponse(version=request.min_version)
        yield b"serialized already"

    async with _serve(GetStatistics=get_statistics, Pull=pull) as channel:
        assert await _statistics(channel) == server_pb2.PullResponse(version=3).SerializeToString()
        answers = await _pull(channel)
    assert answers == [server_pb2.PullResponse(version=7).SerializeToString(), b"serialized already"]


async def test_a_cancelled_stream_ends_its_handler() -> None:
    ended = asyncio.Event()

    async def pull(*_: object) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with _serve(Pull=pull) as channel:
        call = channel.unary_stream(f"/{SERVICE.full_name}/Pull")(PULL)
        assert await call.read() == b"first"
        call.cancel()
        async with asyncio.timeout(30):
            await ended.wait()
