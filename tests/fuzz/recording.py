"""Recordings of real calls: the requests that psdist's own clients of this process send, by method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import grpc.aio

#: Requests that are kept of each method.
_KEPT_MAX: Final = 400

#: By path of a method, the serialized requests in the order in which they were sent.
Recording = dict[str, list[bytes]]


@contextmanager
def recording() -> Iterator[Recording]:
    """Record requests while the block runs."""
    kept: Recording = {}

    def patched(kind: str) -> Callable[..., Any]:
        original = getattr(grpc.aio._channel.Channel, kind)

        def call(self: Any, method: str, request_serializer: Any = None, *args: Any, **others: Any) -> Any:
            def serialize(message: Any) -> bytes:
                data = bytes(message) if request_serializer is None else request_serializer(message)
                if len(requests := kept.setdefault(method, [])) < _KEPT_MAX:
                    requests.append(data)
                return data

            return original(self, method, serialize, *args, **others)

        return call

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    with mock.patch.multiple(grpc.aio._channel.Channel, **{kind: patched(kind) for kind in kinds}):
        yield kept
