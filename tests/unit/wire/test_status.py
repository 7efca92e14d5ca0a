"""Errors cross the wire unchanged; failures of gRPC itself become classes of psdist."""

from __future__ import annotations

import grpc
import grpc.aio

from psdist import errors
from psdist.v1 import common_pb2
from psdist.wire import status


def _failed(code: grpc.StatusCode, detail: bytes | None = None, text: str = "boom") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if detail is None else grpc.aio.Metadata((status.DETAIL_KEY, detail))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text)


def test_every_error_comes_back_as_itself() -> None:
    for cls in sorted(errors.BY_CODE.values(), key=lambda cls: cls.code):
        error = cls("what happened", value=3)
        detail = status.to_detail(error).SerializeToString()
        back = status.from_call(_failed(grpc.StatusCode[cls.status], detail), "server-0")
        assert type(back) is cls
        assert (back.message, back.details) == ("what happened", {"value": "3"})


def test_an_unknown_code_is_an_internal_error() -> None:
    detail = common_pb2.ErrorDetail(code="from_the_future", message="news")
    assert type(status.from_detail(detail)) is errors.InternalError


def test_what_the_transport_says() -> None:
    for code, cls in [
        (grpc.StatusCode.UNAVAILABLE, errors.ServerUnreachableError),
        (grpc.StatusCode.CANCELLED, errors.ClosedError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.UnauthenticatedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitExceededError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.WaitTimeoutError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgumentError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ]:
        error = status.from_call(_failed(code, text="socket closed"), "server-0 (h:1)")
        assert type(error) is cls
        assert "server-0 (h:1)" in error.message and "socket closed" in error.message


def test_long_messages_are_cut() -> None:
    assert len(status.to_detail(errors.InternalError("x" * 100_000)).message) <= 2000
