"""gRPC channel for tests that talk to a program by hand."""

from __future__ import annotations

import grpc.aio


def open_channel(address: str, message_bytes: int = 256 << 20) -> grpc.aio.Channel:
    """Return a channel that refuses nothing by itself.

    psdist's own channels rely on callers that retry; this one gives a busy machine twenty seconds to connect.
    """
    options = [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
