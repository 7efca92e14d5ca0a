"""Errors to and from gRPC: one status code and one ErrorDetail message each. Only this module knows both sides.

A server aborts a call with the error's status, its message, and the detail in the trailing metadata
``psdist-error-bin``. A client turns a failed call back into the same class. A failed call without the detail (from the
transport itself, or a peer that is not psdist) becomes the class that its status suggests.
"""

from __future__ import annotations

from typing import Final, NoReturn

import grpc
import grpc.aio

from psdist import errors
from psdist.errors import PsdistError
from psdist.v1 import common_pb2
from psdist.wire import limits

DETAIL_KEY: Final = "psdist-error-bin"

_BY_STATUS: Final[dict[grpc.StatusCode, type[PsdistError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceededError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.WaitTimeoutError,
    grpc.StatusCode.CANCELLED: errors.ClosedError,
    grpc.StatusCode.UNAVAILABLE: errors.ServerUnreachableError,
}


def to_detail(error: PsdistError) -> common_pb2.ErrorDetail:
    """The message that carries ``error``."""
    details = {key: value[: limits.DETAIL_CHARACTERS_MAX] for key, value in error.details.items()}
    return common_pb2.ErrorDetail(
        code=error.code, message=error.message[: limits.ERROR_CHARACTERS_MAX], details=details
    )


def from_detail(detail: common_pb2.ErrorDetail) -> PsdistError:
    """The error that ``detail`` carries; an InternalError where its code is unknown."""
    cls = errors.BY_CODE.get(detail.code, errors.InternalError)
    return cls(detail.message, **dict(detail.details))


async def abort(context: grpc.aio.ServicerContext, error: PsdistError) -> NoReturn:
    """Ends the call with ``error``."""
    detail = to_detail(error)
    metadata = ((DETAIL_KEY, detail.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.status], detail.message, metadata)
    raise AssertionError("abort returned")


def from_call(error: grpc.aio.AioRpcError, peer: str) -> PsdistError:
    """The error that a failed call to ``peer`` (a role and an address, for the message) stands for."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    cls = _BY_STATUS.get(error.code(), errors.InternalError)
    return cls(f"{peer}: {error.code().name}: {error.details() or 'no details'}", status=error.code().name)
