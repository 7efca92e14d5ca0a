"""A gRPC channel of a test that speaks to a program by hand."""

from __future__ import annotations

import grpc.aio


def open_channel(address: str, message_bytes: int = 256 << 20) -> grpc.aio.Channel:
    """A channel that itself refuses nothing. Unlike psdist's own, whose callers try again, it gives a busy machine
    twenty seconds to connect."""
    options = [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
