"""Conversion of errors to and from gRPC: a status code and an ErrorDetail message. Only this module knows both sides.

A server aborts a call with the error's status, its message, and the detail in the trailing metadata
``psdist-error-bin``. A client converts a failed call back to the same class. Failures without the detail, from gRPC
itself or a foreign peer, become the class that their status suggests.
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
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceededError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.WaitTimeoutError,
    grpc.StatusCode.CANCELLED: errors.ClosedError,
    grpc.StatusCode.UNAVAILABLE: errors.ServerUnreachableError,
}


def to_detail(error: PsdistError) -> common_pb2.ErrorDetail:
    """Return the message that encodes ``error``."""
    details = {key: value[: limits.DETAIL_CHARACTERS_MAX] for key, value in error.details.items()}
    return common_pb2.ErrorDetail(
        code=error.code, message=error.message[: limits.ERROR_CHARACTERS_MAX], details=details
    )


def from_detail(detail: common_pb2.ErrorDetail) -> PsdistError:
    """Return the error encoded in ``detail``, or an InternalError if its code is unknown."""
    cls = errors.BY_CODE.get(detail.code, errors.InternalError)
    return cls(detail.message, **dict(detail.details))


async def abort(context: grpc.aio.ServicerContext, error: PsdistError) -> NoReturn:
    """End the call with ``error``."""
    detail = to_detail(error)
    metadata = ((DETAIL_KEY, detail.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.status], detail.message, metadata)
    raise AssertionError("abort returned")


def from_call(error: grpc.aio.AioRpcError, peer: str) -> PsdistError:
    """Return the error for a failed call to ``peer`` (a role and an address, for the message)."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    cls = _BY_STATUS.get(error.code(), errors.InternalError)
    return cls(f"{peer}: {error.code().name}: {error.details() or 'no details'}", status=error.code().name)
